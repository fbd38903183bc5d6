"""The demo's loop under random kills: does it end where an undisturbed run ends, and leave nothing behind?

    python tools/soak.py                 10 minutes; --minutes 4 --seed 7 for another soak

    undisturbed   |---------------------------------------------| last step
    round 1       |-------x   |---x      |--------x  |----------| last step     x = SIGKILL of one process
    round 2       |---x   |-------------x   |...
                  piece   piece (each resumes from the newest checkpoint of its round)

A round is the demo from its first step to its last; new rounds begin until the minutes are over. Killed at
random, one at a time: the rollout process, the embedded server, a trainer rank; sometimes while a piece is
still starting. After the rounds a rollout process plays 20,000 rollouts on a scripted server, and may not
keep anything of them. Ends with a table of verdicts; exit code 1 when one of them failed. It must never
touch a process that is not its own: they are known by a mark in their environment.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import re
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import psutil

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from leaks import resident_sets  # noqa: E402

from metrics import read_lines  # noqa: E402

MARK = "TREEGRPO_SOAK"
SAVE_STEPS = 5
END_S = 20.0  # a kill ends all processes of a piece within this
START_S = 120.0  # a piece has made a step by then
PIECE_S = 1800.0  # nothing takes longer
REWARD_WINDOWS = 10
REWARD_TOLERANCE = 0.03
ROLLOUTS = 20_000  # of the rollout process alone
ROLLOUT_TOLERANCE = 0.02  # growth of its resident set over the second half of them
MEMORY_TOLERANCE = 0.10  # growth of a resident set, at the same age
# role -> what its command line holds, and its rank
ROLES = {
    "rank 0": ("train.py", "0"),
    "rank 1": ("train.py", "1"),
    "rollouts": ("multiprocessing.spawn", "0"),
    "server": ("serve.py", "0"),
}


@dataclass
class Piece:
    """One start of the loop, until it ends or something of it is killed."""

    number: int
    killed: str = ""  # role
    code: int | None = None
    end_s: float = 0.0  # from the kill to the end of torchrun
    left: list[str] = field(default_factory=list)  # processes that outlived it
    ledger: str = ""
    balanced: bool = True
    memory: dict[str, list[tuple[float, float]]] = field(default_factory=dict)  # role -> (age in s, MiB)


def demo_command() -> list[str]:
    """The command of the demo, word for word."""
    lines = (ROOT / "runs/demo_cpu.sh").read_text().replace("\\\n", " ").splitlines()
    words = shlex.split(next(line for line in lines if line.startswith("torchrun")))
    return [sys.executable, "-m", "torch.distributed.run", *[w for w in words[1:] if w != "$@"]]


def members(mark: str) -> dict[str, psutil.Process]:
    """Living processes of a piece by role; those without one by their command line."""
    found = {}
    for process in psutil.process_iter():
        try:
            environment, line = process.environ(), " ".join(process.cmdline())
            if environment.get(MARK) != mark or process.status() == psutil.STATUS_ZOMBIE:
                continue
        except psutil.Error:
            continue
        rank = environment.get("RANK")
        role = next((r for r, (word, of) in ROLES.items() if word in line and rank == of), line)
        found[role] = process
    return found


def measure(piece: Piece, processes: dict[str, psutil.Process]) -> None:
    for role in ROLES.keys() & processes.keys():
        try:
            process = processes[role]
            sample = (time.time() - process.create_time(), process.memory_info().rss / 2**20)
        except psutil.Error:
            continue
        piece.memory.setdefault(role, []).append(sample)


def records(output_dir: Path) -> list[dict]:
    return [json.loads(line) for line in read_lines(output_dir / "metrics.jsonl")]


def run_piece(number: int, output_dir: Path, rng: random.Random | None) -> Piece:
    """Start the loop, from the newest checkpoint if there is one; kill one of its processes (rng: which)."""
    piece, mark = Piece(number), uuid.uuid4().hex
    arguments = ["--output_dir", str(output_dir), "--save_steps", str(SAVE_STEPS)]
    if any(output_dir.glob("checkpoint-*")):
        arguments += ["--resume_from_checkpoint", "true"]
    log = output_dir.with_name(f"{output_dir.name}-{number}.log")
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", MARK: mark}
    process = subprocess.Popen(
        [*demo_command(), *arguments],
        cwd=ROOT,
        env=environment,
        stdout=log.open("w"),
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        wait_and_kill(piece, process, mark, output_dir, rng)
    finally:
        left = settle(mark)
        for stray in left.values():
            stray.kill()
        process.wait()
    piece.code = process.returncode
    piece.left = sorted(left)
    read_ledger(piece, log.read_text())
    return piece


def run_round(output_dir: Path, pieces: list[Piece], rng: random.Random, deadline: float) -> None:
    """Pieces, until one is left to end by itself."""
    killed = "not yet"
    while killed:
        peace = time.monotonic() > deadline
        piece = run_piece(len(pieces) + 1, output_dir, None if peace else rng)
        print(f"{output_dir.name} {describe(piece, len(records(output_dir)))}", flush=True)
        pieces.append(piece)
        killed = piece.killed


def wait_and_kill(piece: Piece, process, mark: str, output_dir: Path, rng) -> None:
    started, made, kill_at = time.monotonic(), records(output_dir), None
    if rng and rng.random() < 0.25:
        kill_at = started + rng.uniform(1, 12)  # while it starts
    ended_by = started + PIECE_S
    while process.poll() is None and time.monotonic() < ended_by:
        time.sleep(0.25)
        running = members(mark)
        measure(piece, running)
        now = time.monotonic()
        if rng and kill_at is None:
            if records(output_dir)[-1:] != made[-1:]:
                kill_at = now + rng.uniform(1, 15)
            elif now - started > START_S:
                raise RuntimeError(f"piece {piece.number} made no step in {START_S:.0f} s")
        roles = sorted(ROLES.keys() & running.keys())
        if roles and kill_at and now > kill_at and not piece.killed:
            piece.killed = rng.choice(roles)
            running[piece.killed].kill()
            ended_by = now + 2 * END_S
    if piece.killed:
        piece.end_s = time.monotonic() - kill_at


def settle(mark: str) -> dict[str, psutil.Process]:
    """What is still there three seconds after a piece has ended."""
    deadline = time.monotonic() + 3.0
    while (left := members(mark)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left


def read_ledger(piece: Piece, text: str) -> None:
    found = re.findall(
        r"samples: (\d+) generated = (\d+) trained \+ (\d+) dropped .* \+ (\d+) in flight", text
    )
    if found:
        generated, *rest = map(int, found[-1])
        piece.ledger = f"{generated} = {' + '.join(map(str, rest))}"
        piece.balanced = generated == sum(rest)


def describe(piece: Piece, step: int) -> str:
    killed = f"killed {piece.killed}, ended after {piece.end_s:.1f} s" if piece.killed else "undisturbed"
    ledger = f"; ledger {piece.ledger}" if piece.ledger else "; no ledger"
    left = f"; LEFT BEHIND {piece.left}" if piece.left else ""
    return f"piece {piece.number}: {killed}, code {piece.code}, at step {step}{ledger}{left}"


# ---- verdicts: (what, is it fine, the numbers)


def reward_at_the_end(output_dir: Path) -> float:
    rewards = [r["reward"] for r in records(output_dir) if r.get("reward") is not None]
    return statistics.mean(rewards[-REWARD_WINDOWS:]) if rewards else math.nan


def at_age(samples: list[tuple[float, float]], age: float) -> float:
    return [mib for at, mib in samples if at <= age][-1]


def memory_verdicts(pieces: list[Piece], undisturbed: Piece) -> list[tuple[str, bool, str]]:
    """Resident sets: early against late pieces at the same age, and inside the undisturbed run."""
    verdicts = []
    for role in ROLES:
        samples = undisturbed.memory[role]
        oldest = samples[-1][0]
        then, now = at_age(samples, oldest / 2), samples[-1][1]
        text = f"undisturbed {then:.0f} MiB at half its age, {now:.0f} MiB at {oldest:.0f} s"
        growth = now / then - 1
        lived = [piece.memory[role] for piece in pieces if role in piece.memory]
        age = statistics.median(sample[-1][0] for sample in lived)
        reached = [at_age(samples, age) for samples in lived if samples[-1][0] >= age]
        if third := len(reached) // 3:
            early, late = statistics.median(reached[:third]), statistics.median(reached[-third:])
            growth = max(growth, late / early - 1)
            text += f"; at age {age:.0f} s early pieces {early:.0f}, late ones {late:.0f} MiB"
        verdicts.append((f"memory of {role}", growth <= MEMORY_TOLERANCE, f"{text}; growth {growth:+.1%}"))
    return verdicts


def rollout_verdict() -> tuple[str, bool, str]:
    """The rollout process alone, on the tests' server: turns, tools and environments, never trained on."""
    sizes = resident_sets(ROLLOUTS, looks=10)
    growth = sizes[-1] / sizes[4] - 1
    text = f"{sizes[0]:.0f}, {sizes[4]:.0f}, {sizes[-1]:.0f} MiB after a tenth, half and all of {ROLLOUTS:,}"
    text += f"; growth of the second half {growth:+.1%}"
    return "memory of rollouts", growth <= ROLLOUT_TOLERANCE, text


def verdicts(pieces: list[Piece], rounds: list[Path], undisturbed: Piece, whole_dir: Path):
    kills = Counter(piece.killed for piece in pieces if piece.killed)
    yield "kills", bool(kills), ", ".join(f"{role} {count}" for role, count in sorted(kills.items()))
    told = [piece for piece in [undisturbed, *pieces] if piece.ledger]
    balanced = sum(piece.balanced for piece in told)
    text = f"{balanced} of {len(told)} balance ({len(pieces) + 1} starts)"
    yield "ledgers", balanced == len(told) > 0, text
    left = [thing for piece in [undisturbed, *pieces] for thing in piece.left]
    yield "left behind", not left, ", ".join(left) or "no process"
    slowest = max((piece.end_s for piece in pieces), default=0.0)
    yield "end after a kill", slowest <= END_S, f"slowest {slowest:.1f} s, allowed {END_S:.0f} s"
    codes = [piece.code == 0 for piece in pieces if not piece.killed] + [undisturbed.code == 0]
    loud = all(piece.code != 0 for piece in pieces if piece.killed)
    yield "exit codes", all(codes) and loud, "0 exactly where nothing was killed" if loud else "a kill gave 0"
    made = [[r["step"] for r in records(directory)] for directory in [whole_dir, *rounds]]
    same = all(steps == made[0] for steps in made) and made[0] == list(range(1, len(made[0]) + 1))
    yield "steps", same, f"{len(made[0])} in each of {len(rounds)} rounds, every step recorded once"
    yield from memory_verdicts(pieces, undisturbed)
    yield rollout_verdict()
    rewards, whole = [reward_at_the_end(directory) for directory in rounds], reward_at_the_end(whole_dir)
    text = f"{', '.join(f'{reward:.3f}' for reward in rewards)} with kills, {whole:.3f} undisturbed"
    fine = all(reward >= whole - REWARD_TOLERANCE for reward in rewards)
    yield "reward", fine, f"{text}, tolerance {REWARD_TOLERANCE}"


def main() -> None:
    parser = argparse.ArgumentParser(description="The demo's loop under random kills.")
    parser.add_argument("--minutes", type=float, default=10.0, help="how long there are kills")
    parser.add_argument("--seed", type=int, help="of the kills; drawn and printed when left out")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what runs is ended on the way out
    seed = random.SystemRandom().randrange(10**6) if options.seed is None else options.seed
    rng, started = random.Random(seed), time.monotonic()
    base = Path(tempfile.mkdtemp(prefix="soak-"))
    print(f"soak: seed {seed}, {options.minutes:g} minutes, in {base}", flush=True)
    pieces, rounds, deadline = [], [], started + 60 * options.minutes
    while time.monotonic() < deadline:
        rounds.append(base / f"round-{len(rounds) + 1}")
        run_round(rounds[-1], pieces, rng, deadline)
    print(f"{len(pieces)} pieces took {(time.monotonic() - started) / 60:.1f} minutes", flush=True)
    undisturbed = run_piece(0, base / "undisturbed", None)
    print(describe(undisturbed, len(records(base / "undisturbed"))), flush=True)
    failed = False
    for name, fine, text in verdicts(pieces, rounds, undisturbed, base / "undisturbed"):
        print(f"{'ok    ' if fine else 'FAILED'} {name:20} {text}")
        failed |= not fine
    raise SystemExit(1 if failed else 0)


if __name__ == "__main__":
    main()
