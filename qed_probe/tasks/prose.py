"""Endless prose from a small grammar, ours, in place of the essays that RULER hides its needles in.

It has the variety of words that repeated noise lacks, 10⁸ different sentences, and no thread of meaning from one to the next. It
holds no digit.
"""

from collections.abc import Iterator

import numpy as np

PATTERNS = (
    "{who} {did} {what}.",
    "{who} {how} {did} {what}.",
    "{who} {did} {what} {where}.",
    "{who} {did} {what}, {clause}.",
    "{when}, {who} {did} {what}.",
    "{when}, {who} {how} {did} {what} {where}.",
    "{where}, {who} {did} {what}.",
    "{who} {how} {did} {what}, and {clause}.",
)
WORDS: dict[str, tuple[str, ...]] = {
    "who": (
        "the baker", "an old sailor", "the night watchman", "my neighbour", "a young painter", "the surveyor", "our teacher",
        "the clockmaker", "a patient gardener", "the postman", "a travelling singer", "the miller's daughter", "her uncle",
        "the youngest clerk", "a retired engineer", "the ferryman", "the village doctor", "a tired student", "the librarian",
        "their cousin", "the carpenter", "a stubborn printer", "the head cook", "an honest merchant", "the beekeeper",
        "a famous botanist", "the stationmaster", "a small committee", "the whole family", "the apprentice",
    ),
    "did": (
        "repaired", "described", "borrowed", "carried home", "forgot", "painted", "measured", "sold", "found", "admired",
        "hid", "copied", "polished", "asked about", "counted", "bought back", "unpacked", "sketched", "mended", "weighed",
        "gave away", "looked after", "wrote about", "dreamed of", "rebuilt", "kept", "talked about", "waited for", "lost",
    ),
    "what": (
        "a wooden boat", "the broken compass", "two loaves of bread", "a letter without a stamp", "the map of the valley",
        "an unfinished song", "the copper kettle", "a box of seeds", "the oldest plough", "a pair of boots", "the church bell",
        "a jar of honey", "three blue plates", "the harvest ledger", "a heavy coat", "the garden wall", "a book of riddles",
        "the last photograph", "a cart full of stones", "the weather glass", "a basket of plums", "the rusty gate",
        "a chair with one leg missing", "the long ladder", "a bundle of old newspapers", "the mill wheel", "a silver spoon",
        "the plan for a bridge", "an argument about money", "a list of names",
    ),
    "how": (
        "slowly", "gladly", "once more", "in secret", "without a word", "almost by accident", "carefully", "at last", "badly",
        "with great patience", "never quite", "proudly", "in a hurry", "rarely", "against all advice", "quietly",
    ),
    "where": (
        "behind the chapel", "at the edge of the forest", "in the upper room", "on the way to market", "near the harbour",
        "under a leaking roof", "by the light of a candle", "in the next village", "beside the canal", "at the foot of the hill",
        "in the shade of the walnut tree", "between two showers", "on the far bank", "in front of everybody", "at the inn",
        "along the dusty road",
    ),
    "when": (
        "early that spring", "after the storm", "on the first day of winter", "long before noon", "when the fog had lifted",
        "in those years", "one evening in autumn", "while the others slept", "as soon as the snow melted", "the week before",
        "during the long drought", "just before closing time", "late at night", "on market day", "as far as anyone remembers",
        "in the middle of the night",
    ),
    "clause": (
        "nobody asked why", "the rain did not stop", "which pleased the children", "the dog followed at a distance",
        "as the law required", "although it was hardly worth the trouble", "the neighbours said so for years",
        "because the price had fallen", "the lamp went out", "which was thought to be unlucky", "the others only laughed",
        "for that was the custom", "so the meeting ended early", "the bill was never paid", "though few believed it",
        "the tea had gone cold", "which explains the smell", "the river kept rising", "as everyone knew", "the road was closed",
        "but that is another story", "the choir had to begin again", "if the diary can be trusted", "the wind turned at dusk",
    ),
}  # fmt: skip
SENTENCES = 3


def prose(rng: np.random.Generator) -> Iterator[str]:
    """Lines of three sentences each, without end, a function of ``rng`` alone."""
    while True:
        yield " ".join(_sentence(shares) for shares in rng.random((SENTENCES, 1 + len(WORDS))).tolist())


def _sentence(shares: list[float]) -> str:
    pattern = PATTERNS[int(shares[0] * len(PATTERNS))]
    words = {name: some[int(share * len(some))] for (name, some), share in zip(WORDS.items(), shares[1:], strict=True)}
    text = pattern.format(**words)
    return text[0].upper() + text[1:]
