"""Words of the page that are not in everyday use, each explained beside the sentence that has it."""

from collections.abc import Iterable

TERMS = {
    "selective log Z": "how far a query's attention is from even over the keys it sees; 0 where it is even",
    "log Z": "the logarithm of the sum over keys of e to the score",
    "own write": "what this head alone adds to the vector of the token",
    "whole attention update": "what all heads of the layer together add to the vector of the token",
    "key origin": "a vector that may be added to all keys of a head; it moves raw scores and leaves attention as it is",
    "mismatched": "the writes of other heads of the layer, in place of the head's own",
    "re-initialised": "a copy of the model with random weights of the same sizes",
    "effective keys": "that many keys of equal weight have the same entropy",
    "effective number of keys": "that many keys of equal weight have the same entropy",
    "effective rank": "how many directions the vectors of a window use",
    "log-determinant": "the logarithm of the volume that the vectors of a window fill",
    "log n": "the largest entropy that n keys allow",
    "largest possible entropy": "log n, that of n keys of equal weight",
    "residual stream": "the vector of each token, to which every layer adds",
    "false discovery": "the share of the named heads that are expected to be named by chance",
    "no-op": "a head that does nothing",
    "nats": "units of information; 1 nat is 1.44 bits",
}


def explained(texts: Iterable[str | None]) -> list[dict[str, str]]:
    """The terms that the texts use, each with its meaning; a term within a longer one is not explained again."""
    left = " ".join(text for text in texts if text).lower()
    found = []
    for term, meaning in TERMS.items():
        if term.lower() in left:
            found.append({"term": term, "meaning": meaning})
            left = left.replace(term.lower(), " ")
    return found
