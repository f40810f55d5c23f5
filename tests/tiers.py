"""Which tests are thorough: `make test` leaves them to `make test-rest`, and continuous integration runs both.

`make test-rest` runs every fifth file of them, another lot each day. `make test-rest ARGS="--turns 1"` runs all.

The quick tier has every law of every method, and tests of each part. What is thorough holds the same over more: other
combinations, instruction sets, formats and settings, real processes for longer. A new test belongs here if it takes
many seconds and something quicker would find most of what it finds. Of laws over many combinations a run takes a
sample, another one every day (`tests/seeds.py`), and so does the quick tier of the cases that `SAMPLED` names. The
slower ones of the quick tests, which `tests/slow.txt` lists, take turns of four days in it; on the other days they
are among the thorough ones.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from functools import cache
from pathlib import Path

HERE = Path(__file__).resolve().parent
TIERS = ("quick", "rest", "all")

# {why: whole files, or single tests of files (each with all of its cases)}. Beside these, tests with the mark
# `thorough`: kernels of other instruction sets than this machine's own (tests/ops/targets.py).
THOROUGH: dict[str, tuple[str, ...]] = {
    "laws over covering arrays, or over every method with several others and settings": (
        "decode/test_block_diffusion_natively.py::test_no_further_from_float32_than_the_open_path",
        "decode/test_then.py::test_drafts_change_no_greedy_token_and_some_are_accepted",
        "decode/test_then.py::test_in_bfloat16_drafts_and_mates_change_nothing",
        "decode/test_then.py::test_sampled_tokens_are_a_seeds_own",
        "decode/test_then.py::test_where_there_is_little_room_requests_make_way",
        "engine/test_native_sights.py::test_windows_of_some_heads_are_read_as_the_open_path_reads_them",
        "laws/test_bfloat16.py::test_independent_of_batch_mates_in_bfloat16", "laws/test_compositions.py",
        "laws/test_distribution.py::test_speculation_keeps_the_distribution",
        "laws/test_growth.py::test_at_120_methods_the_thorough_samples_are_no_larger", "laws/test_kv_methods.py",
        "laws/test_methods.py::test_tokens_are_a_requests_own_in_what_a_method_holds",
        "laws/test_methods.py::test_tokens_are_a_requests_own_under_other_schedulers", "laws/test_neutral.py",
        "laws/test_recipes.py::test_tight_memory_changes_nothing", "laws/test_sampled_drafts.py",
        "sample/test_forbidden.py::test_with_every_method", "sample/test_grammar.py::test_drafts_change_no_token",
        "sample/test_grammar.py::test_no_verifier_accepts_what_is_forbidden",
        "sample/test_grammar.py::test_placements_change_no_token",
        "store/test_cachegen.py::test_lost_preempted_and_tight_over_another_form",
        "store/test_cachegen.py::test_over_other_methods",
        "store/test_cachegen.py::test_over_rows_in_another_form",
        "speculation/test_drawn_trees.py::test_with_more_seeds_at_every_temperature",
        "test_cuda_ready.py::test_who_reads_no_more_is_taken_off_the_list",
        "verify/test_acceptance.py::test_chosen_children_are_accepted_by_their_mass",
    ),
    "random load, full pools, bad links, endless texts": (
        "engine/test_endless.py::test_a_prompt_of_many_contexts_streams",
        "engine/test_endless.py::test_drafts_from_the_text_go_on_beyond_the_context",
        "engine/test_endless.py::test_little_memory_is_enough_and_preemption_changes_nothing",
        "engine/test_endless.py::test_twenty_contexts_take_the_memory_of_two",
        "engine/test_engine.py::test_random_load_of_methods",
        "kv/test_beside.py::test_requests_that_crowd_each_other_stay_within_the_budget",
        "serve/route/test_route_server.py",
        "place/test_disaggregated.py::test_random_load_over_a_bad_link_to_mortal_workers",
        "place/test_push.py::test_random_load_over_a_bad_link_to_mortal_workers",
        "place/test_semi_pd.py::test_a_full_pool_never_stands_still",
        "place/test_semi_pd.py::test_a_full_pool_with_companions",
        "place/test_semi_pd.py::test_a_message_that_is_lost_late_or_doubled_costs_no_token",
        "place/test_semi_pd.py::test_random_load_over_a_bad_link_to_mortal_workers",
        "place/test_semi_pd.py::test_unused_prefixes_make_way_on_the_other_side",
        "place/test_splitwise.py::test_random_load_over_a_bad_link_to_mortal_workers",
    ),
    "real processes that die, hang, sleep or are measured, on Ray and for a while": (
        "cluster/test_recipe_update.py",
        "cluster/test_processes.py::test_a_stopped_worker_is_taken_for_dead",
        "cluster/test_processes.py::test_splitwise_may_lose_either_side",
        "cluster/test_processes.py::test_workers_outlive_their_fork_server_and_one_that_does_not_answer_is_replaced",
        "cluster/test_processes.py::test_workers_that_pause_are_waited_for", "cluster/test_ray.py",
        "cluster/test_ray_server.py", "draft/test_seat.py::test_a_process_of_its_own",
        "cluster/test_shared_pool.py", "cluster/test_soak.py",
        "plan/test_profile.py::test_workers_of_one_machine_are_measured_beside_each_other", "plan/test_serving.py",
        "serve/test_cluster.py", "serve/test_sleep.py",
    ),
    "servers that a test starts for itself: keys, logs, files read again, bad and many clients": (
        "model/test_client_template.py::test_a_hostile_one_ends_with_a_reason",
        "serve/playground/test_files.py::test_the_address_is_printed",
        "serve/playground/test_files.py::test_with_keys_the_page_is_open_and_nothing_else",
        "serve/playground/test_files.py::test_without_a_playground_there_is_none", "serve/test_after.py",
        "serve/test_bombs.py", "serve/test_deaf.py", "serve/test_direct.py", "serve/test_endless.py",
        "serve/test_events.py", "serve/test_infill.py", "serve/test_keys.py",
        "serve/test_kv_restart.py", "serve/test_limits.py",
        "serve/test_logprobs.py::test_tokens_in_other_processes", "serve/test_logs.py", "serve/test_many_streams.py",
        "serve/test_openapi.py", "serve/test_punctual.py", "serve/test_reload.py",
        "serve/test_templates.py::test_hostile_ones_hurt_nobody", "serve/test_traces.py",
    ),
    "calls of tools in every format, from models that say anything": (
        "serve/tools/test_calculator.py", "serve/tools/test_chat_tools.py::test_formats_of_coders",
        "serve/tools/test_chat_tools.py::test_strict_arguments_follow_their_schema_whatever_the_model_would_say",
        "serve/tools/test_chat_tools.py::test_strict_arguments_of_calls_that_need_not_be",
        "serve/tools/test_forced.py::test_a_tool_without_a_schema_has_any_object",
        "serve/tools/test_forced.py::test_every_complete_answer_is_a_call",
        "serve/tools/test_forced.py::test_streams_are_the_same", "serve/tools/test_readers.py::test_calls_come_back",
        "serve/tools/test_readers.py::test_the_whole_text_tells_the_same",
        "serve/tools/test_readers.py::test_what_is_no_call_is_content_to_the_letter",
    ),
    "training runs": (
        "train/test_augment_tuning.py", "train/test_c2c_several.py", "train/test_c2c_training.py",
        "train/test_draft.py", "train/test_kv_heads.py", "train/test_kv_prediction_training.py",
        "train/test_masked.py", "train/test_memory.py", "train/test_other_models.py::test_it_is_trained_and_serves",
        "train/test_quality.py::test_a_model_that_knows_the_answers_scores_one_and_a_mute_one_zero",
        "train/test_rlkv.py", "train/test_tools.py", "train/test_validation.py",
    ),
    "whole reproductions, plans and reports; rounds on real models and against other engines": (
        "bench/test_compare.py", "bench/test_later.py", "bench/test_layer_ablation.py",
        "bench/test_playground_cost.py",
        "cli/test_kv.py::test_tables_lines_csv_plot_and_page",
        "cli/test_plan.py::test_a_plan_from_a_profile_divides_one_machine_and_says_how_it_was_measured",
        "cli/test_plan.py::test_guesses_are_a_choice_that_serve_takes", "cli/test_report.py",
        "draft/test_by_name.py::test_pocket_says_what_it_says_without",
        "draft/test_easyspec.py::test_calibration_keeps_the_acceptance_of_a_trained_model",
        "draft/test_easyspec.py::test_samples_have_the_targets_distribution",
        "draft/test_swift.py::test_the_search_on_a_trained_model",
        "skip/test_unified.py::test_the_shipped_weights_do_better_than_none",
        "plan/test_headlines.py",
        "plan/test_search.py::test_pruning_changes_no_winner",
        "plan/test_twin.py::test_the_same_moments",
        "report/test_page.py::test_a_load_of_which_everything_failed_still_has_its_page",
        "report/test_page.py::test_answers_that_came_at_once_have_no_gaps",
        "report/test_page.py::test_every_bar_stands_with_its_request_and_with_its_worker",
        "reproduce/test_augment.py", "reproduce/test_cli.py",
        "reproduce/test_controls.py::test_random_running_holds_as_much_but_others", "reproduce/test_later.py",
        "reproduce/test_models.py", "reproduce/test_page.py", "reproduce/test_stored.py", "reproduce/test_systems.py",
        "sample/test_grammar.py::test_smollm2_writes_what_is_asked",
    ),
    "wheels, files of others, fetched or spoilt; kernels under emulation": (
        "gguf/test_fuzz.py", "gguf/test_real_files.py", "known/test_fetch.py",
        "ops/test_native_neon.py::test_dot_products_are_left_alone_where_there_are_none",
        "ops/test_native_neon.py::test_on_arm", "ops/test_native_neon.py::test_on_this_processor", "test_wheel.py",
    ),
}  # fmt: skip

# {file: {test: cases}}. Of these tests' cases, which cross the same code with other settings, moments, seeds or mates,
# the quick tier runs at most so many a day; in a few days each has its turn. The thorough tier has the others.
SAMPLED: dict[str, dict[str, int]] = {
    "attend/test_chosen_steps.py": {
        "test_a_step_is_one_call_and_gives_what_halves_give": 4,
        "test_a_cache_with_gaps_is_asked_for": 3,
        "test_forks_and_rollbacks": 3,
        "test_several_rows_and_single_ones_take_turns": 3,
    },
    "attend/test_infllm.py": {"test_means_equal_those_of_the_whole": 1},
    "attend/test_loopserve.py": {"test_greedy_lines_hold_most_of_what_the_best_ones_hold": 1},
    "attend/test_selectors.py": {
        "test_what_is_kept_follows_forks": 2,
        "test_what_is_kept_follows_rollbacks_and_evictions": 2,
    },
    "attend/test_zero_tuning_steps.py": {
        "test_whole_steps_read_as_the_open_path_reads": 2,
        "test_where_it_cannot_be_told_by_slots_it_is_asked": 1,
    },
    "decode/test_block_diffusion.py": {
        "test_prefixes_are_shared_in_whole_blocks": 1,
        "test_sampled_candidates_are_drawn_afresh_at_every_step": 1,
    },
    "decode/test_block_diffusion_natively.py": {
        "test_not_a_bit_depends_on_anything_else": 4,
        "test_every_step_is_one_native_call": 4,
    },
    "decode/test_c2c.py": {"test_tokens_are_those_of_rows_fused_by_hand": 1},
    "decode/test_c2c_several.py": {"test_tokens_are_a_requests_own": 1},
    "decode/test_contrastive.py": {"test_equals_full_recomputation": 3},
    "decode/test_kv_prediction.py": {"test_tokens_are_those_of_rows_mapped_by_hand": 1},
    "decode/test_pie.py": {
        "test_answers_that_were_decoded_otherwise_are_never_a_prefix_of_others": 3,
        "test_hostile_texts_take_no_time": 2,
    },
    "decode/test_then.py": {"test_drafts_behind_latents_stand_as_far_on": 2},
    "draft/test_draft_model.py": {
        "test_match_gives_plain_samples": 2,
        "test_the_target_as_its_own_draft_is_always_right": 3,
    },
    "draft/test_easyspec.py": {"test_greedy_tokens_are_plain_decodings": 2},
    "draft/test_lookahead.py": {"test_the_window_is_a_jacobi_iteration": 2},
    "draft/test_paced.py": {"test_alone_it_comes_near_the_best_size": 2},
    "draft/test_pearl.py": {
        "test_the_target_as_its_own_draft_is_always_right": 2, "test_the_targets_distribution_is_kept": 2,
    },
    "draft/test_rasd.py": {"test_the_distribution_stays": 1},
    "draft/test_swift.py": {
        "test_other_families": 2,
        "test_greedy_tokens_are_plain_decodings_whatever_is_left_out": 2,
        "test_the_search_changes_no_token": 1,
    },
    "evict/test_running.py": {
        "test_keyformer_without_noise_keeps_the_rows_of_h2o": 1,
        "test_however_rows_come": 2,
        "test_what_has_gone_never_comes_back": 1,
        "test_a_models_own_window_hides_rows_from_the_scores": 1,
    },
    "evict/test_running_weighed.py": {"test_a_token_that_failed_leaves_no_trace": 1},
    "kv/test_blocks.py": {"test_every_row_reads_what_it_would_alone": 3},
    "kv/test_drawers.py": {"test_drawers_that_are_handed_on_are_booked_where_they_land": 1},
    "laws/test_declarations.py": {"test_a_broken_law_is_named": 1},
    "laws/test_double.py": {"test_parts_of_a_prompt_have_the_kv_and_logits_of_the_whole": 3},
    "laws/test_growth.py": {"test_every_pair_is_covered_by_hardly_more_rows_than_there_must_be": 3},
    "laws/test_parts.py": {"test_tokens_are_a_requests_own": 2},
    "laws/test_recipes.py": {
        "test_a_recipe_whose_method_raises_fails_only_its_own": 3,
        "test_in_bfloat16_mates_of_another_recipe_change_nothing": 1,
    },
    "laws/test_sure.py": {"test_every_scheduler_and_few_rows": 4},
    "place/test_disaggregated.py": {
        "test_a_message_that_is_lost_late_or_doubled_costs_no_token": 12,
        "test_cancelling_at_any_moment_frees_both_sides_at_once": 9,
        "test_methods_go_on_where_they_were": 1,
    },
    "place/test_push.py": {
        "test_a_message_that_is_lost_late_or_doubled_costs_no_token": 5,
        "test_a_word_about_missing_room_that_is_lost_late_or_doubled_costs_no_token": 4,
        "test_a_worker_may_die_at_any_moment": 3,
        "test_cancelling_at_any_moment_frees_both_sides": 9,
        "test_methods_go_on_where_they_were": 1,
        "test_a_piece_that_does_not_fit_is_recomputed": 2,
        "test_real_pieces_take_the_time_of_the_closed_forms": 3,
    },
    "place/test_recipes.py": {"test_recipes_in_every_placement": 1},
    "place/test_semi_pd.py": {
        "test_a_worker_may_die_at_any_moment": 3,
        "test_cancelling_at_any_moment_frees_everything_at_once": 3,
        "test_methods_go_on_where_they_were": 1,
    },
    "place/test_splitwise.py": {"test_a_worker_may_die_at_any_moment": 2, "test_methods_go_on_where_they_were": 1},
    "request/test_ask.py": {"test_the_method_is_asked_wherever_the_request_runs": 3},
    "sample/test_forced.py": {"test_passes_by_the_closed_form": 2, "test_drafted_in_a_mixed_batch": 1},
    "sample/test_grammar.py": {"test_what_is_completed_is_valid": 1},
    "sample/test_greedy_steps.py": {
        "test_mixed_batches_give_what_each_gets_alone": 3,
        "test_nor_does_one_under_a_grammar": 1,
        "test_others_need_them": 5,
        "test_a_greedy_step_writes_no_logits": 3,
    },
    "sample/test_momentum.py": {"test_drafts_change_no_token": 1},
    "schedule/test_layered.py": {"test_tokens_equal_whole_prompts": 1},
    "schedule/test_slo.py": {"test_tokens_do_not_depend_on_targets": 1},
    "schedule/test_splitfuse.py": {"test_steps_of_the_engine_are_full_and_tokens_are_the_same": 1},
    "skip/test_lazyllm.py": {"test_it_goes_with": 2},
    "skip/test_unified.py": {
        "test_equals_a_model_of_the_kept_layers_over_the_prompts_kv": 2,
        "test_tuned_rows_equal_a_model_with_the_low_rank_weights_merged_in": 1,
    },
    "speculation/test_asking.py": {"test_they_are_never_judged_and_never_kept": 5},
    "speculation/test_greedy.py": {
        "test_tokens_are_a_requests_own": 2,
        "test_tokens_are_plain_decodings": 2,
        "test_kv_after_every_step_is_plain_decodings": 3,
        "test_a_stop_token_inside_an_accepted_run_ends_there": 7,
        "test_never_more_than_max_tokens": 6,
    },
    "speculation/test_growing.py": {"test_what_the_request_went_on_with_stays": 4},
    "speculation/test_large_trees.py": {"test_their_rows_are_within_the_budget": 1},
    "speculation/test_tails.py": {
        "test_afterwards_the_kv_is_as_before": 2,
        "test_a_pass_that_raises_leaves_the_kv_as_it_was": 2,
        "test_native_passes_are_the_open_ones": 4,
    },
    "store/test_cachegen.py": {"test_apart_as_in_one_place": 1},
    "store/test_kivi.py": {"test_tails_and_bytes_after_every_token": 2},
    "store/test_packed.py": {
        "test_whole_steps_are_as_near_as_the_open_path": 2,
        "test_drafts_read_bit_for_bit_what_single_rows_read": 2,
        "test_trees_read_bit_for_bit_what_their_paths_read": 2,
    },
    "store/test_packed_classes.py": {
        "test_whole_steps_are_as_near_as_the_open_path": 1,
        "test_mates_change_no_token_and_share_the_call": 1,
    },
    "store/test_zipcache.py": {"test_bytes_after_every_token": 1},
    "test_cuda_ready.py": {"test_a_method_mixes_no_devices_and_reads_where_it_is_listed": 30},
    "verify/test_k_seq.py": {"test_the_law_is_the_targets": 4},
    "verify/test_transfer.py": {"test_a_small_eta_is_rejection": 2},
}  # fmt: skip

# Files that take longest, by the processor's time or by waiting: a worker that is given one of them last keeps all
# others waiting. Those of many processes stand apart, so that they seldom run at the same time.
LONGEST = (
    "laws/test_golden.py",
    "laws/test_methods.py", "cluster/test_soak.py", "reproduce/test_systems.py", "laws/test_kv_methods.py",
    "cluster/test_ray_server.py", "laws/test_compositions.py", "laws/test_recipes.py", "laws/test_sampled_drafts.py",
    "cluster/test_processes.py", "serve/tools/test_forced.py", "cluster/test_ray.py", "laws/test_distribution.py",
    "attend/test_selectors.py", "plan/test_serving.py", "train/test_c2c_training.py", "place/test_semi_pd.py",
    "place/test_push.py", "train/test_validation.py", "serve/tools/test_chat_tools.py", "train/test_draft.py",
    "gguf/test_real_files.py", "test_wheel.py", "bench/test_compare.py", "engine/test_native_sights.py",
    "speculation/test_greedy.py", "place/test_splitwise.py", "ops/test_native_heads.py", "ops/test_native_bias.py",
    "serve/test_ends.py", "place/test_disaggregated.py",
)  # fmt: skip

DAYS = 4  # in which each of the slower quick tests has its turn
DAILY = (  # what runs every day, however slow
    "laws/", "serve/clients/", "cluster/test_processes.py::test_killed_at_work", "model/test_oracle.py", "test_",
)  # fmt: skip

_ENTRIES = frozenset(entry for entries in THOROUGH.values() for entry in entries)


@cache
def file(path: Path) -> str:
    """A path as from this folder, which itself is "."."""
    return Path(os.path.relpath(path.resolve(), HERE)).as_posix()


def thorough(file: str, test: str) -> bool:
    """Whether a test, without its case, is listed; `file` as from this folder."""
    return file in _ENTRIES or f"{file}::{test}" in _ENTRIES


def sampled(file: str, test: str, cases: int, today: int) -> Collection[int]:
    """Which of so many cases of a test the quick tier runs on this day: all, or those whose turn it is."""
    most = SAMPLED.get(file, {}).get(test, 0)
    turns = -(-cases // most) if most else 1
    return range(today % turns, cases, turns) if cases else ()


@cache
def slow() -> dict[str, int]:
    """The slower quick tests, as `scripts/slow_tests.py` wrote them, and the turn of each."""
    lines = (HERE / "slow.txt").read_text(encoding="utf-8").splitlines()
    return {line.split()[0]: i % DAYS for i, line in enumerate(line for line in lines if line and line[0] != "#")}


def of_another_day(file: str, test: str, today: int) -> bool:
    """Whether a test is one of the slower ones and has its turn on another day."""
    return slow().get(f"{file}::{test}", today % DAYS) != today % DAYS


def named(file: str, given: Sequence[str]) -> bool:
    """Whether a file, or a folder around it below this one, is among the paths that the command line gives."""
    return any(file == one or file.startswith(f"{one}/") for one in given)


def chosen(tier: str, thorough: bool, named: bool) -> bool:
    """Whether a test runs. Who names a thorough one wants it, in the quick tier too."""
    return tier == "all" or (thorough if tier == "rest" else named or not thorough)


def later(files: Collection[str], turns: int, today: int, given: Sequence[str]) -> set[str]:
    """The files whose turn is on another day. Within `turns` days each has one; the longest are spread over all days.
    What the command line names does not wait."""
    ranked = sorted(files, key=lambda file: (place(file), file))
    return {file for i, file in enumerate(ranked) if i % turns != today % turns and not named(file, given)}


def place(file: str) -> int:
    """Where a file's tests stand: the longest files first, the longest of them foremost; all others after them."""
    return LONGEST.index(file) if file in LONGEST else len(LONGEST)
