"""The stories of docs/choosing.md: from targets to a configuration, which is then served and asked.

    python scripts/choosing.py chat|summaries|laptop [--model smollm2] [--profile FILE] [--work DIR]

Prints every command and what it said. `chat` plans from a profile (made if there is none yet), and serves the plan
under the load it was made for; `summaries` and `laptop` tune on the model itself, and serve the choice beside the
default. Five to fifteen minutes each, with nothing else running.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from phasewise.bench.server import serving
from phasewise.cli import config as files
from phasewise.errors import UserError

CHAT = "--workload lognormal:prompt=150,longest=800,new=60,new_longest=160 --cv 2"
CHAT_TARGETS = "--ttft 1000 --tpot 60"
LONG = "--workload fixed:prompt=1500,new=100"
ONE = "--workload fixed:prompt=300,new=150"
SAVERS = ["draft=prompt_lookup", "evict=snapkv:keep=0.5", "store=int8"]
DRAFTS = ["draft=prompt_lookup", "draft=prompt_lookup:k=4", "draft=token_recycling"]
PLAIN = ["--draft", "none"]  # what the others are held against
PART = 0.8  # of the rate that a plan promises: nobody runs a service at its limit


def run(words: str | list[str], program: str = "phasewise") -> str:
    """Print a command and what it said. Raises UserError if it fails."""
    given = words.split() if isinstance(words, str) else words
    print(f"\n```\n$ {program} {' '.join(given)}", flush=True)
    done = subprocess.run([sys.executable, "-m", program, *given], capture_output=True, text=True)
    print(f"{done.stdout.strip()}\n```", flush=True)
    if done.returncode:
        raise UserError(f"{program} {given[0]} ended with {done.returncode}: {done.stderr.strip()[-400:]}")
    return done.stdout


def promised(config: Path) -> float:
    """Requests/s of the plan in a file."""
    line = next(line for line in config.read_text().splitlines() if "requests/s within" in line)
    return float(line.split("each ")[1].split(" requests/s")[0])


def chat(model: str, profile: Path, work: Path) -> None:
    """A chat service whose requests come in bursts."""
    if not profile.exists():
        run(f"profile --model {model} --dtype bfloat16 --out {profile}")
    config = work / "chat.toml"
    run(f"plan --profile {profile} {CHAT} --requests 1500 {CHAT_TARGETS} --config {config}")
    print(f"\n{config.name}:\n\n```toml\n{config.read_text().strip()}\n```")
    rate = round(PART * promised(config), 2)
    with serving(["--config", str(config)]) as url:
        run(f"bench load --url {url} {CHAT} --rate {rate} --requests 150 {CHAT_TARGETS}")


def tuned(name: str, words: list[str], load: str, own: list[str], work: Path) -> None:
    """Tune, and ask the choice and the default the same, one after the other."""
    config = work / f"{name}.toml"
    run(["tune", *words, "--config", str(config)])
    print(f"\n{config.name}:\n\n```toml\n{config.read_text().strip()}\n```")
    for what, options in (("the choice", ["--config", str(config)]), ("the default", own)):
        print(f"\n{what}:")
        with serving(options) as url:
            run(f"bench load --url {url} {load} --requests 1")  # what is only done once
            run(f"bench load --url {url} {load}")
    assert files.read(config)["model"]


def summaries(model: str, profile: Path, work: Path) -> None:
    """Long prompts in batches; nobody waits for the first token."""
    own = ["--model", model, "--dtype", "bfloat16"]
    judged = ["--max-loss", "1%", "--quality", "docs@2k", "--rounds", "3"]
    words = [*own, *PLAIN, *LONG.split(), "--requests", "4", *judged, *SAVERS]
    tuned("summaries", words, f"{LONG} --prompts code --rate inf --requests 16", [*own, *PLAIN], work)


def laptop(model: str, profile: Path, work: Path) -> None:
    """One user on a small machine, who wants the model's own answers, soon."""
    own = ["--model", model, "--dtype", "bfloat16", "--kv-bytes", "512M"]
    words = [*own, *PLAIN, *ONE.split(), "--requests", "1", "--max-loss", "0", *DRAFTS]
    tuned("laptop", words, f"{ONE} --prompts code --rate 0.2 --requests 8", [*own, *PLAIN], work)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    stories = {story.__name__: story for story in (chat, summaries, laptop)}
    parser.add_argument("story", choices=stories)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--profile", type=Path, default=Path("profile.json"))
    parser.add_argument("--work", type=Path, default=Path())
    args = parser.parse_args()
    try:
        stories[args.story](args.model, args.profile, args.work)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
