"""Plant the faults of tests/faults one by one, and see which test catches each: `make faults`.

Each fault is planted in a scratch copy of this tree, and the tests run until the first one fails: those that caught
faults of the same file before, then those next to the file, those that import it, those of its area, and all others.
That order changes no verdict. A test counts only if it passes in the copy without the fault. Verdicts are noted as
they come, so a run that was interrupted goes on where it was, and only faults that are new or were changed are
planted again. In the end a table is written.

    python scripts/faults.py                        # all faults, the quick tests and then the thorough ones
    python scripts/faults.py --tier quick           # the quick tests alone
    python scripts/faults.py --only ID --only ID    # these, whether they were planted before or not
    python scripts/faults.py --likely               # only tests that import or stand beside what is broken
    python scripts/faults.py --control              # first all quick tests without a fault, which must pass

Of C++ only the library that this processor uses is built, and of it only what the fault changes.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import importlib.util
import json
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.faults.planted import Fault, faults  # noqa: E402
from tests.tiers import LONGEST as LONGEST_FILES  # noqa: E402

PAGE = ROOT / "docs" / "results" / "faults.md"
NOTES = ROOT / "docs" / "results" / "faults.jsonl"
NATIVE = Path("src/phasewise/ops/native")
GOLDEN = "tests/laws/test_golden.py"
FOLDERS = {
    "kernels": ("ops",), "cluster": ("cluster", "place"), "wrappers": ("draft", "decode"), "draft": ("draft", "sample"),
    "engine": ("engine", "request"), "kv": ("kv", "engine", "evict"),
}  # fmt: skip
FIRST = {"wrappers": ["tests/laws/test_traits.py"]}  # of an area, before anything of it was planted
FEW = 4  # files of tests
PATIENCE = 240  # seconds of one test; it then counts as failed
LONGEST = 5400  # seconds of one run of tests
PRELOADED = ("torch", "numpy", "scipy.stats", "safetensors.torch", "tokenizers", "starlette", "httpx", "jinja2")


@dataclass(frozen=True)
class Verdict:
    """`by`: the tier that has the test which caught a fault (quick | rest), or "nobody" of those that ran (`ran`)."""

    id: str
    area: str
    about: str
    digest: str
    by: str
    ran: str
    test: str
    seconds: float
    commit: str


def digest(fault: Fault) -> str:
    return hashlib.sha256("\0".join((fault.file, fault.find, fault.put)).encode()).hexdigest()[:12]


# ---- a copy of the tree
class Scratch:
    """A copy of the tree in which faults are planted."""

    def __init__(self, root: Path, target: str | None) -> None:
        self.root, self.target = root, target
        names = subprocess.check_output(["git", "-C", ROOT, "ls-files", "-co", "--exclude-standard", "-z"], text=True)
        for name in filter(None, names.split("\0")):
            if (ROOT / name).is_file() and not name.startswith("runs/"):
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, root / name)
        for library in (ROOT / NATIVE).glob("*.so"):
            shutil.copy2(library, root / NATIVE / library.name)
        # bytecode that names the hash of its source is never taken for that of another one: a broken file and the
        # unbroken one may be of the same size and second
        subprocess.run(
            [sys.executable, "-m", "compileall", "-q", "-j", "1", "--invalidation-mode", "checked-hash", "src"],
            cwd=root, check=False,
        )  # fmt: skip

    def plant(self, fault: Fault | None) -> None:
        """Break a file, and what is built from it; None: nothing is broken any more."""
        for path, text in self._before(fault):
            file = self.root / path
            file.unlink()
            file.write_text(text, encoding="utf-8")
            if file.suffix in (".cpp", ".h"):
                assert self.target is not None, "no kernels were built here: faults in C++ cannot be planted"
                build(self.root, self.target, None if file.suffix == ".h" else file.name)

    def _before(self, fault: Fault | None) -> Iterator[tuple[str, str]]:
        broken: dict[str, str] = self.__dict__.setdefault("broken", {})
        for path in list(broken):
            yield path, broken.pop(path)
        if fault is not None:
            text = (self.root / fault.file).read_text(encoding="utf-8")
            yield fault.file, fault.planted(text)
            broken[fault.file] = text


def build(root: Path, target: str, changed: str | None) -> None:
    """The kernels of one instruction set, from objects of the whole tree and those that have changed (None: all)."""
    spec = importlib.util.spec_from_file_location("phasewise_setup", ROOT / "setup.py")
    assert spec is not None and spec.loader is not None
    setup = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(setup)
    flags = [*setup.FLAGS, *setup.targets[target], "-fPIC"]
    objects = root / "build" / "objects"
    objects.mkdir(parents=True, exist_ok=True)

    def compiled(source: Path) -> Path:
        made = objects / f"{source.stem}.o"
        if not made.exists() or changed is None or source.name == changed:
            subprocess.run([os.environ.get("CXX", "c++"), *flags, "-c", source, "-o", made], check=True, cwd=root)
        return made

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        made = list(pool.map(compiled, sorted((root / NATIVE).glob("*.cpp"))))
    library = root / NATIVE / f"_{target}.so"
    linked = library.with_suffix(".new")
    subprocess.run([os.environ.get("CXX", "c++"), "-shared", *made, "-o", linked], check=True)
    linked.replace(library)


def target_here() -> str | None:
    """The instruction set whose library this processor uses."""
    code = "from phasewise.ops.native import library; found = library(); print(found._name if found else '')"
    path = subprocess.check_output([sys.executable, "-c", code], text=True, env=environment(ROOT)).strip()
    return Path(path).stem.removeprefix("_") or None


def environment(root: Path) -> dict[str, str]:
    known = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(root / "src")}
    return {**os.environ, **known}


# ---- tests
class Watch:
    """A pytest plugin: only some files, in their order, and of each the tests that have a word in their name first.
    What ran last, and the first failure, are written down."""

    def __init__(self, root: Path, files: Sequence[str], leaves_out: Sequence[str], word: str, note: Path) -> None:
        self.root, self.files, self.leaves_out, self.word, self.note = root, list(files), set(leaves_out), word, note
        self.failed = ""

    def pytest_ignore_collect(self, collection_path: Path) -> bool | None:
        if collection_path.suffix != ".py" or not collection_path.name.startswith("test_"):
            return None
        name = collection_path.relative_to(self.root).as_posix()
        return (name not in self.files) if self.files else (name in self.leaves_out)

    def pytest_collection_finish(self, session: Any) -> None:
        place = {name: i for i, name in enumerate(self.files)}
        session.items.sort(
            key=lambda item: (place.get(item.path.relative_to(self.root).as_posix(), 0), self.word not in item.nodeid)
        )
        found = sys.modules.get("phasewise")
        assert found is None or str(found.__file__).startswith(str(self.root)), "tests of another tree"

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.note.write_text(json.dumps({"running": nodeid}))

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed and not self.failed:
            self.failed = report.nodeid
            self.note.write_text(json.dumps({"failed": report.nodeid, "why": str(report.longrepr)[-2000:]}))

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed and not self.failed:
            self.failed = f"{report.nodeid} (collection)"
            self.note.write_text(json.dumps({"failed": self.failed, "why": str(report.longrepr)[-2000:]}))


class Over(Exception):
    """A fault has had its time (`--budget`)."""


def run_tests(
    root: Path, tier: str, files: Sequence[str] = (), leaves_out: Sequence[str] = (), deselected: Sequence[str] = (),
    word: str = "", only: str = "", ends: float = float("inf"),
) -> str:  # fmt: skip
    """The first test that fails in a tree, "" if none does. In a process of its own, with the libraries loaded."""
    note = root / "note.json"
    note.write_text("{}")
    child = os.fork()
    if child == 0:
        _test(root, tier, Watch(root, files, leaves_out, word, note), deselected, only)
    code = _waited(child, min(ends, time.monotonic() + LONGEST))
    if time.monotonic() > ends:
        raise Over
    said = json.loads(note.read_text())
    if "failed" in said:
        return str(said["failed"])
    if code not in (0, 5):  # a crash, or nothing more to wait for
        return f"{said.get('running', 'collection')} (ended with {code})"
    return ""


def _test(root: Path, tier: str, watch: Watch, deselected: Sequence[str], only: str) -> None:
    """Does not return."""
    code = 3
    try:
        os.setsid()
        os.chdir(root)
        os.environ.update(environment(root))
        os.environ.pop("PYTEST_DEBUG_TEMPROOT", None)
        sys.path[:0] = [str(root), str(root / "src")]
        for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
            del sys.modules[name]  # those of this script's own tree
        log = os.open(root / "tests.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1), os.dup2(log, 2)
        import pytest

        chosen = [only] if only else ["tests"]
        left = [word for each in deselected for word in ("--deselect", each)]
        words = ["-q", "-x", "-n", "0", "-p", "no:cacheprovider", f"--timeout={PATIENCE}"]
        words += ["--tier", tier, "--every-day"]
        code = int(pytest.main([*words, *left, *chosen], plugins=[watch]))
    finally:
        os._exit(code)


def _waited(child: int, ends: float) -> int:
    """The exit status of a child, which is ended with all that it has started if it takes too long."""
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            break
        if time.monotonic() > ends:
            os.killpg(child, signal.SIGKILL)
        time.sleep(0.05)
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # servers and workers that a failing test has left behind
    return os.waitstatus_to_exitcode(status)


def word_of(fault: Fault) -> str:
    """What a method, or a file, is called."""
    return Path(fault.file).stem.lstrip("_")


def caught_before(fault: Fault, path: Path) -> list[str]:
    """The files of the tests that caught this fault, or others of the same file; those that caught most come first."""
    file_of = {each.id: each.file for each in faults()}
    found: Counter[str] = Counter()
    for verdict in known(path).values():
        if verdict.test and file_of.get(verdict.id) == fault.file:
            found[verdict.test.partition("::")[0]] += 1 + 1000 * (verdict.id == fault.id)
    found.pop(GOLDEN, None)  # long, and asked after those that stand beside the file
    return [name for name, _ in found.most_common(3) if (ROOT / name).is_file()]


def stages(fault: Fault, results: Path) -> list[list[str]]:
    """Files of tests, the likeliest to catch a fault first."""
    every = [path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "tests").rglob("test_*.py"))]
    hints = [*FIRST.get(fault.area, []), *caught_before(fault, results)]
    stem, module = (
        word_of(fault),
        fault.file.removeprefix("src/").removesuffix(".py").replace("/", "."),
    )
    folders = [f"tests/{name}/" for name in FOLDERS.get(fault.area, (fault.area,))]
    folders.append(f"tests/{Path(fault.file).parent.name}/")
    slow = {f"tests/{name}" for name in LONGEST_FILES}
    beside = [name for name in every if re.match(rf"test_(native_)?{stem}(_|\.)", Path(name).name)]
    if fault.file.endswith((".cpp", ".h")):
        imports = [name for name in every if "/test_native_" in name]
    else:
        words = re.compile(
            rf"\b{re.escape(module)}\b|\bfrom {re.escape(module.rpartition('.')[0])} import .*\b{stem}\b"
        )
        imports = [name for name in every if words.search((ROOT / name).read_text(encoding="utf-8"))]
    near = [name for name in every if name.startswith(tuple(folders))]
    found, seen = [], {"tests/faults/test_faults_apply.py"}
    every_near = [*imports, *near]
    quick = [[name for name in stage if name not in slow] for stage in (imports, near)]
    golden = [GOLDEN] if GOLDEN in every else []  # minutes: a few files that import what is broken come before it
    imports, near = quick
    first = [imports, near, golden] if len(imports) <= FEW else [near, golden, imports]
    for stage in (*([name] for name in hints), beside, *first, every_near):
        fresh = [name for name in dict.fromkeys(stage) if name not in seen]
        seen.update(fresh)
        if fresh:
            found.append(fresh)
    return found


class Judge:
    """Plants one fault after the other in one scratch tree."""

    def __init__(self, scratch: Scratch, options: argparse.Namespace, passes: Any, commit: str) -> None:
        self.scratch, self.options, self.passes, self.commit = scratch, options, passes, commit
        self.ends = float("inf")

    def judge(self, fault: Fault) -> Verdict:
        began = time.monotonic()
        by, test, ran = "nobody", "", str(self.options.tier) + (", likely" if self.options.likely else "")
        self.ends = began + self.options.budget
        self.scratch.plant(fault)
        try:
            for tier in {"quick": ("quick",), "rest": ("rest",)}.get(self.options.tier, ("quick", "rest")):
                test = self._caught(fault, tier)
                if test:
                    by = tier
                    break
        except Over:
            ran += f", for {self.options.budget:.0f} s"
        finally:
            self.scratch.plant(None)
        seconds = time.monotonic() - began
        return Verdict(fault.id, fault.area, fault.about, digest(fault), by, ran, test, round(seconds, 1), self.commit)

    def _caught(self, fault: Fault, tier: str) -> str:
        """The first test of a tier that fails with the fault, and without it does not."""
        likely = stages(fault, self.options.results)
        every: list[list[str]] = [*likely, *([] if self.options.likely else [[]])]
        left_out: list[str] = ["tests/faults/test_faults_apply.py"]
        wrong: list[str] = []  # fail without the fault, too
        word = word_of(fault)
        for files in every:
            while test := run_tests(self.scratch.root, tier, files, left_out, wrong, word, ends=self.ends):
                if self._fails_because_of(fault, test, tier):
                    return test
                if test.partition(" (")[0] in wrong:
                    break  # it cannot be left out
                wrong.append(test.partition(" (")[0])
            left_out += files
        return ""

    def _fails_because_of(self, fault: Fault, test: str, tier: str) -> bool:
        name = test.partition(" (")[0]
        if name not in self.passes:
            self.scratch.plant(None)
            self.passes[name] = not run_tests(self.scratch.root, "all", only=name) if "::" in name else True
            self.scratch.plant(fault)
        return bool(self.passes[name])


# ---- all of them
def known(path: Path) -> dict[str, Verdict]:
    """What was noted before; of a fault that was planted several times, the last."""
    if not path.is_file():
        return {}
    lines = path.read_text(encoding="utf-8").splitlines()
    return {verdict.id: verdict for verdict in (Verdict(**json.loads(line)) for line in lines)}


def settled(fault: Fault, verdict: Verdict | None, options: argparse.Namespace) -> bool:
    """Whether a fault need not be planted again for what is asked now."""
    if verdict is None or verdict.digest != digest(fault):
        return False
    far = ("all", options.tier) if not options.likely else ("all", options.tier, f"{options.tier}, likely")
    return verdict.by != "nobody" or verdict.ran in far


def note(path: Path, verdict: Verdict) -> None:
    with path.open("a", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(json.dumps(asdict(verdict)) + "\n")


def work(number: int, queue: Any, told: Any, options: argparse.Namespace, passes: Any, commit: str) -> None:
    """One worker, with a scratch tree of its own, until nothing is left to do."""
    with tempfile.TemporaryDirectory(prefix=f"phasewise-faults-{number}-", ignore_cleanup_errors=True) as folder:
        scratch = Scratch(Path(folder), options.target)
        judge = Judge(scratch, options, passes, commit)
        while (fault := queue.get()) is not None:
            told.put(("begins", number, fault.id))
            verdict = judge.judge(fault)
            note(options.results, verdict)
            told.put(("ends", number, verdict))
        told.put(("over", number, None))


def main() -> None:
    options = arguments()
    every = faults()
    for name in options.only:
        if name not in {fault.id for fault in every}:
            sys.exit(f"error: no fault is called {name!r}")
    before = known(options.results)
    wanted = [fault for fault in every if not options.only or fault.id in options.only]
    wanted = [fault for fault in wanted if not options.area or fault.area in options.area]
    todo = [f for f in wanted if options.only or options.again or not settled(f, before.get(f.id), options)]
    if not options.table:
        for name in PRELOADED:
            __import__(name)
        options.target = target_here()
        options.results.parent.mkdir(parents=True, exist_ok=True)
        if options.control:
            control(options)
        print(f"{len(todo)} of {len(wanted)} faults are to be planted, by {options.workers} workers")
        run(todo, options)
    table(every, known(options.results))


def control(options: argparse.Namespace) -> None:
    """The unbroken tree must pass."""
    with tempfile.TemporaryDirectory(prefix="phasewise-faults-control-", ignore_cleanup_errors=True) as folder:
        test = run_tests(
            Scratch(Path(folder), options.target).root, "quick", leaves_out=["tests/faults/test_faults_apply.py"]
        )
        if test:
            sys.exit(f"error: {test} fails without any fault: mend that first")
    print("all quick tests pass without a fault")


def run(todo: Sequence[Fault], options: argparse.Namespace) -> None:
    fork = multiprocessing.get_context("fork")
    queue, told, passes = fork.Queue(), fork.Queue(), fork.Manager().dict()
    commit = subprocess.check_output(["git", "-C", ROOT, "rev-parse", "--short", "HEAD"], text=True).strip()
    for fault in [*todo, *[None] * options.workers]:
        queue.put(fault)
    workers = [
        fork.Process(target=work, args=(i, queue, told, options, passes, commit)) for i in range(options.workers)
    ]
    for worker in workers:
        worker.start()
    began, done, over = time.monotonic(), 0, 0
    while over < len(workers):
        what, _, said = told.get()
        spent = f"{(time.monotonic() - began) / 60:.1f} min"
        if what == "ends":
            done += 1
            who = said.test if said.by != "nobody" else f"nobody ({said.ran})"
            print(f"[{done}/{len(todo)}, {spent}] {said.id}: {who}, {said.seconds:.0f} s", flush=True)
        over += what == "over"


# ---- the table
def table(every: Sequence[Fault], verdicts: dict[str, Verdict]) -> None:
    """Write the page, and say the shares."""
    found = [(fault, verdicts.get(fault.id)) for fault in every]
    told = {fault.id: v for fault, v in found if v is not None and v.digest == digest(fault)}
    counts = Counter(v.by for v in told.values())
    commits = sorted({v.commit for v in told.values()})
    said = (
        f"{len(every)} small breakages of the source ([tests/faults](../../tests/faults)), each planted by itself: "
        f"{counts['quick']} are caught by the quick tests, {counts['rest']} by the thorough ones, {counts['nobody']} "
        f"by none of those that were asked, and {len(every) - len(told)} were not planted yet. Tests run until the "
        "first one fails; a test counts only if it passes without the fault. Seconds say little: the machine was not "
        f"always quiet. `make faults` goes on with what is missing or was changed. Planted at "
        f"{', '.join(commits) or 'none yet'}."
    )
    lines = ["# Planted faults", "", *textwrap.wrap(said, 108, break_on_hyphens=False), ""]
    by_area: dict[str, list[Fault]] = defaultdict(list)
    for fault in every:
        by_area[fault.area].append(fault)
    lines += ["| area | faults | quick | rest | none | not planted |", "|---|---|---|---|---|---|"]
    for area, own in by_area.items():
        each = Counter(told[f.id].by if f.id in told else "none" for f in own)
        lines.append(f"| {area} | {len(own)} | {each['quick']} | {each['rest']} | {each['nobody']} | {each['none']} |")
    for area, own in by_area.items():
        lines += [
            "",
            f"## {area}",
            "",
            "| fault | what is wrong | caught by | test | seconds |",
            "|---|---|---|---|---|",
        ]
        lines += [_row(fault, told.get(fault.id)) for fault in own]
    PAGE.parent.mkdir(parents=True, exist_ok=True)
    PAGE.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"{len(told)} of {len(every)} planted: {dict(counts)}; {PAGE.relative_to(ROOT)}")


def _row(fault: Fault, verdict: Verdict | None) -> str:
    if verdict is None:
        return f"| {fault.id} | {fault.about} | not planted | | |"
    by = verdict.by if verdict.by != "nobody" else f"none ({verdict.ran})"
    test = f"`{verdict.test.removeprefix('tests/')}`".replace("|", "\\|") if verdict.test else ""
    return f"| {fault.id} | {fault.about} | {by} | {test} | {verdict.seconds:.0f} |"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tier", choices=("quick", "rest", "all"), default="all", help="which tests may catch a fault")
    parser.add_argument("--only", action="append", default=[], metavar="ID", help="plant this one, again if need be")
    parser.add_argument("--area", action="append", default=[], help="those of this area alone")
    parser.add_argument("--likely", action="store_true", help="leave out tests that are far from what is broken")
    parser.add_argument(
        "--budget", type=float, default=float("inf"), help="seconds of a fault, then it is left undecided"
    )
    parser.add_argument("--again", action="store_true", help="plant what was planted before as well")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) // 2), help="faults at a time")
    parser.add_argument("--control", action="store_true", help="first the quick tests without a fault")
    parser.add_argument("--table", action="store_true", help="plant nothing: write the table")
    parser.add_argument("--results", type=Path, default=NOTES, help="where verdicts are noted")
    return parser.parse_args()


if __name__ == "__main__":
    main()
