"""Reassignment: variables get new values, and the current one of a variable is asked for.

A needle task holds nothing that is out of date; here, what the memory keeps of the asked variable's earlier values has to
give way to the last. Each of three variables is assigned two or three times, all values different, and one of them is asked
for. The assignments lie anywhere in the noise line of ``niah``, each cut position uniform and independent of the others. So
the last assignment of all is the asked variable's in a third of the samples: who answers with the latest value, whatever its
key, is right as often, and with any value of the asked variable in two fifths. The task and its wording are our own.

Roles are noise, question (the opening instruction included) and answer, and of the assignments: current, the asked variable's
last one; other, the other variables' last ones; stale, every one that a later one supersedes. Details are length, depth, the
share of the noise before the current assignment, and updates, the number of stale ones of the asked variable. A given depth
leaves the others where they would be, had that depth been drawn: the asked variable's earlier ones uniform before it, the
other variables' anywhere.
"""

from itertools import repeat

import numpy as np

from qed_probe.tasks.samples import ADJECTIVES, DIGITS, LONGEST_KEY, NOISE, NOUNS, Sample, Task, lines_after, lines_before

INSTRUCTION = "Values change. Memorize the current ones.\n"
STATEMENT = "{key} is now {value}."
QUESTION = "\nWhat is {key} now? {key} is now "
VARIABLES, LEAST, MOST = 3, 2, 3
"""Variables, and how often each is assigned."""


def _draw(length: int, rng: np.random.Generator, depth: float | None) -> Sample:
    keys, counts = _keys(rng), rng.integers(LEAST, MOST + 1, VARIABLES)
    updates = int(counts[0]) - 1
    # The largest of n uniform numbers is distributed as the n-th root of one, and the others are uniform below it.
    depth = rng.random() ** (1 / counts[0]) if depth is None else depth
    places = [[*(depth * np.sort(rng.random(updates))).tolist(), depth]]
    places += [np.sort(rng.random(count)).tolist() for count in counts[1:]]
    values = (10 ** (DIGITS - 1) + rng.choice(9 * 10 ** (DIGITS - 1), int(counts.sum()), replace=False)).tolist()
    answer, statements = str(values[updates]), list[tuple[float, str, str]]()
    for key, at, last in zip(keys, places, ("current", "other", "other"), strict=True):
        for place, role in zip(at, ["stale"] * (len(at) - 1) + [last], strict=True):
            statements.append((place, role, STATEMENT.format(key=key, value=values.pop(0))))
    told = sorted(statements, key=lambda statement: statement[0])
    question = QUESTION.format(key=keys[0])
    noise = length - len(INSTRUCTION) - sum(len(text) + 1 for _, _, text in told) + 1 - len(question) - DIGITS
    parts = [("question", INSTRUCTION), *_between(told, noise), ("question", question), ("answer", answer)]
    return Sample(parts, {"depth": float(depth), "updates": float(updates)})


def _keys(rng: np.random.Generator) -> list[str]:
    """Different ones, the first of which is asked for."""
    pairs = rng.choice(len(ADJECTIVES) * len(NOUNS), VARIABLES, replace=False)
    return [f"{ADJECTIVES[pair // len(NOUNS)]}-{NOUNS[pair % len(NOUNS)]}" for pair in pairs]


def _between(statements: list[tuple[float, str, str]], noise: int) -> list[tuple[str, str]]:
    """The statements, each on a line of its own after its share of the noise; a line's end between two comes on top."""
    parts, begun, line_end = [], 0, ""
    for place, role, text in statements:
        end = round(place * noise)
        parts += [("noise", line_end + lines_before(end - begun, repeat(NOISE))), (role, text)]
        begun, line_end = end, "\n"
    return [*parts, ("noise", lines_after(noise - begun, repeat(NOISE)))]


def _shortest() -> int:
    """No noise, the longest keys, the most assignments."""
    statements = VARIABLES * MOST * len(STATEMENT.format(key=LONGEST_KEY, value="0" * DIGITS) + "\n") - 1
    return len(INSTRUCTION) + statements + len(QUESTION.format(key=LONGEST_KEY)) + DIGITS


REASSIGNMENT = Task("reassignment", DIGITS, _shortest, _draw)
