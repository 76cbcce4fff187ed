"""Reassignment: variables get new values, and the current one of a variable is asked for.

A needle task holds nothing that is out of date; here, what the memory keeps of the asked variable's earlier values has to
give way to the last. Each of three variables, capital letters, is assigned two or three times, all values different, and one of
them is asked for. The assignments lie anywhere in the noise line of ``niah``, each cut position uniform and independent of the
others. So the last assignment of all is the asked variable's in a third of the samples: who answers with the latest value,
whatever its key, is right as often, and with any value of the asked variable in two fifths. The task and its wording are our
own. In training, all three are asked for, one after another: with one question a sample, models as small as ours hardly ever
learn to look at the key.

Roles are noise, question (the opening instruction included) and answer, and of the assignments: current, the asked variable's
last one; other, the other variables' last ones; stale, every one that a later one supersedes. Details are length, depth, the
share of the noise before the current assignment, and updates, the number of stale ones of the asked variable. A given depth
leaves the others where they would be, had that depth been drawn: the asked variable's earlier ones uniform before it, the
other variables' anywhere.
"""

import re
from functools import partial
from itertools import repeat
from string import ascii_uppercase

import numpy as np

from qed_probe.tasks.prompts import Prompt
from qed_probe.tasks.samples import DIGITS, NOISE, Sample, Task, lines_after, lines_before

INSTRUCTION = "Values change. Memorize the current ones.\n"
STATEMENT = "{key} = {value}."
QUESTION = "\nWhat is {key} now? {key} = "
QUESTION_AND_ANSWER = len(QUESTION.format(key="X")) + DIGITS
VARIABLES, LEAST, MOST = 3, 2, 3
"""Variables, and how often each is assigned."""
KINDS = ("current", "stale", "other", "other-stale")
"""What a value can be to a question."""
_TOLD = re.compile(rf"([A-Z]) = (\d{{{DIGITS}}})(?:\.|$)")


def _draw(length: int, rng: np.random.Generator, depth: float | None, asked: int = 1) -> Sample:
    keys = rng.choice(list(ascii_uppercase), VARIABLES, replace=False).tolist()
    counts = rng.integers(LEAST, MOST + 1, VARIABLES).tolist()
    # The largest of n uniform numbers is distributed as the n-th root of one, and the others are uniform below it.
    depth = rng.random() ** (1 / counts[0]) if depth is None else depth
    places = [[*(depth * np.sort(rng.random(counts[0] - 1))).tolist(), depth]]
    places += [np.sort(rng.random(count)).tolist() for count in counts[1:]]
    values = (10 ** (DIGITS - 1) + rng.choice(9 * 10 ** (DIGITS - 1), sum(counts), replace=False)).tolist()
    statements, current = list[tuple[float, str, str]](), dict[str, str]()
    for key, at, last in zip(keys, places, ("current", "other", "other"), strict=True):
        for place, role in zip(at, ["stale"] * (len(at) - 1) + [last], strict=True):
            current[key] = str(values.pop(0))
            statements.append((place, role, STATEMENT.format(key=key, value=current[key])))
    told = sorted(statements, key=lambda statement: statement[0])
    questions = [(QUESTION.format(key=key), current[key]) for key in keys[:asked]]
    noise = length - len(INSTRUCTION) - sum(len(text) + 1 for _, _, text in told) + 1 - asked * QUESTION_AND_ANSWER
    ending = [part for question, answer in questions for part in (("question", question), ("answer", answer))]
    parts = [("question", INSTRUCTION), *_between(told, noise), *ending]
    return Sample(parts, {"depth": float(depth), "updates": float(counts[0] - 1)})


def _between(statements: list[tuple[float, str, str]], noise: int) -> list[tuple[str, str]]:
    """The statements, each on a line of its own after its share of the noise; a line's end between two comes on top."""
    parts, begun, line_end = [], 0, ""
    for place, role, text in statements:
        end = round(place * noise)
        parts += [("noise", line_end + lines_before(end - begun, repeat(NOISE))), (role, text)]
        begun, line_end = end, "\n"
    return [*parts, ("noise", lines_after(noise - begun, repeat(NOISE)))]


def kinds(prompt: Prompt) -> dict[str, str]:
    """Every value that a sample assigns, in order, and what it is to the question that ends it.

    current, the right answer; stale, an earlier value of the same variable; other, the last one of another; other-stale, an
    earlier one of another.
    """
    *told, (asked, _) = _TOLD.findall(prompt.tokens.astype(np.uint8).tobytes().decode("ascii"))
    last = dict(told)
    return {value: KINDS[2 * (key != asked) + (value != last[key])] for key, value in told}


def _shortest() -> int:
    """No noise, the most assignments, every question."""
    statements = VARIABLES * MOST * len(STATEMENT.format(key="X", value="0" * DIGITS) + "\n") - 1
    return len(INSTRUCTION) + statements + VARIABLES * QUESTION_AND_ANSWER


_ends = tuple(range(0, VARIABLES * QUESTION_AND_ANSWER, QUESTION_AND_ANSWER))
REASSIGNMENT = Task("reassignment", DIGITS, _shortest, _draw, practice=partial(_draw, asked=VARIABLES), ends=_ends)
