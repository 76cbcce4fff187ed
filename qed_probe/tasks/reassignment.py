"""Reassignment: variables get new values, and the current one of a variable is asked for.

A needle task holds nothing that is out of date; here, what the memory keeps of earlier values has to give way to the last. Of two
variables the asked one is assigned two or three times, the other once or twice, all values different. The assignments lie
anywhere in the noise of ``niah``, each place uniform and independent of the others, so that the last assignment of all is often
the other variable's: the key decides, not the place. The task and its wording are our own.

Roles are noise, question (the opening instruction included), answer, and of the assignments: current, the asked variable's last
one; other, the other variable's last one; stale, every one that a later one supersedes. Details are length, depth, which is the
share of the noise before the current assignment, and updates, the number of stale ones of the asked variable. If the depth is
given, the others are where they would be had it been drawn: the asked variable's earlier ones before it, the other's anywhere.
"""

from itertools import repeat

import numpy as np

from qed_probe.tasks.samples import ADJECTIVES, DIGITS, LONGEST_KEY, NOISE, NOUNS, Sample, Task, lines_after, lines_before

INSTRUCTION = "Magic numbers change. Memorize the current ones.\n"
STATEMENT = "The magic number for {key} is now {value}."
QUESTION = "\nWhat is the current magic number for {key}? The current magic number for {key} is "
MOST_ASKED, MOST_OTHER = 3, 2


def _draw(length: int, rng: np.random.Generator, depth: float | None) -> Sample:
    asked, other = _keys(rng)
    updates, again = int(rng.integers(1, MOST_ASKED)), int(rng.integers(MOST_OTHER))
    # The largest of n uniform numbers is distributed as the n-th root of one, and the others are uniform below it.
    depth = rng.random() ** (1 / (updates + 1)) if depth is None else depth
    at = [*np.sort(depth * rng.random(updates)), depth, *np.sort(rng.random(again + 1))]
    values = [str(value) for value in 10 ** (DIGITS - 1) + rng.choice(9 * 10 ** (DIGITS - 1), len(at), replace=False)]
    roles = ["stale"] * updates + ["current"] + ["stale"] * again + ["other"]
    keys = [asked] * (updates + 1) + [other] * (again + 1)
    statements = [(role, STATEMENT.format(key=name, value=value)) for role, name, value in zip(roles, keys, values, strict=True)]
    question, answer = QUESTION.format(key=asked), values[updates]
    order = np.argsort(at, kind="stable")
    told = [statements[i] for i in order]
    noise = length - len(INSTRUCTION) - sum(len(text) + 1 for _, text in told) + 1 - len(question) - DIGITS
    ends = [round(at[i] * noise) for i in order]
    parts = [("question", INSTRUCTION), *_between(told, ends, noise), ("question", question), ("answer", answer)]
    return Sample(parts, {"depth": float(depth), "updates": float(updates)})


def _keys(rng: np.random.Generator) -> list[str]:
    """Two different ones."""
    pairs = rng.choice(len(ADJECTIVES) * len(NOUNS), 2, replace=False)
    return [f"{ADJECTIVES[pair // len(NOUNS)]}-{NOUNS[pair % len(NOUNS)]}" for pair in pairs]


def _between(statements: list[tuple[str, str]], ends: list[int], noise: int) -> list[tuple[str, str]]:
    """The statements, each on a line of its own after ``ends`` characters of noise; a line's end between two comes on top."""
    parts, begun, line_end = [], 0, ""
    for statement, end in zip(statements, ends, strict=True):
        parts += [("noise", line_end + lines_before(end - begun, repeat(NOISE))), statement]
        begun, line_end = end, "\n"
    return [*parts, ("noise", lines_after(noise - begun, repeat(NOISE)))]


def _shortest() -> int:
    """No noise, the longest keys, the most assignments."""
    most, key = MOST_ASKED + MOST_OTHER, LONGEST_KEY
    statements = most * len(STATEMENT.format(key=key, value="0" * DIGITS) + "\n") - 1
    return len(INSTRUCTION) + statements + len(QUESTION.format(key=key)) + DIGITS


REASSIGNMENT = Task("reassignment", DIGITS, _shortest, _draw)
