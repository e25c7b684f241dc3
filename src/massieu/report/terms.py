"""Terms of the page that need an explanation; each is explained beside the sentence that uses it."""

from collections.abc import Iterable

# A term that contains another one stands before it.
TERMS = {
    "selective log Z": "how far the attention is from uniform over the visible keys, in nats; 0 where it is uniform",
    "log Z": "the logarithm of the softmax's denominator, the sum over keys of e to the score",
    "own write": "the vector that this head alone adds to the token's residual stream",
    "whole attention update": "the vector that all heads of the layer together add to the token's residual stream",
    "key origin": "the zero point of a head's keys: shifting all keys by one vector changes raw scores but not attention",
    "mismatched": "a control: the writes of other heads of the layer in place of the head's own",
    "re-initialised": "a copy of the model with random weights of the same sizes",
    "effective keys": "the number of equally weighted keys that have the same entropy",
    "effective number of keys": "the number of equally weighted keys that have the same entropy",
    "effective rank": "in how many directions the token vectors of a window differ",
    "log-determinant": "the logarithm of the volume that the token vectors of a window fill",
    "log n": "the largest entropy possible with n keys",
    "largest possible entropy": "log n, the entropy of n equally weighted keys",
    "residual stream": "the vector of each token, to which every layer adds",
    "false discovery": "the expected share, among the heads called different, of those that differ by chance only",
    "no-op": "a head that changes nothing",
    "nats": "units of information; 1 nat is 1.44 bits",
}


def explained(texts: Iterable[str | None]) -> list[dict[str, str]]:
    """The terms that the texts use, each with its meaning; a term within a longer one is not explained again."""
    remaining = " ".join(text for text in texts if text).lower()
    used_terms = []
    for term, meaning in TERMS.items():
        if term.lower() in remaining:
            used_terms.append({"term": term, "meaning": meaning})
            remaining = remaining.replace(term.lower(), " ")
    return used_terms
