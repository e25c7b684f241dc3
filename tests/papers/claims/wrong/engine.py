"""A wrong engine of attention and its losses, which the claims run as users do."""

from massieu.measures import Sphere
from massieu.ops import score_tiles
from massieu.papers.claims.shim import contrastive


def scaled(function, factor):
    """The same with every result a little too large."""

    def call(*arguments, **options):
        result = function(*arguments, **options)
        if isinstance(result, tuple):
            return tuple(factor * part for part in result)
        return factor * result

    return call


WRONG = {
    "S23: a loss": ("S23", contrastive, "info_nce", scaled(contrastive.info_nce, 1.0 + 1e-8)),
    "S23: the N-pair loss": ("S23", contrastive, "n_pairs", scaled(contrastive.n_pairs, 1.0 + 1e-8)),
    "S23: a vocabulary's loss": (
        "S23",
        contrastive,
        "linear_cross_entropy",
        scaled(contrastive.linear_cross_entropy, 1.0 + 1e-8),
    ),
    "S23: the loss of neighbours": ("S23", contrastive, "nca", scaled(contrastive.nca, 1.0 + 1e-8)),
    "S23: the sphere": ("S23", Sphere, "_log_partition", scaled(Sphere._log_partition, 1.1)),
    "S23: a gradient": ("S23", score_tiles, "backward", scaled(score_tiles.backward, 1.0 + 1e-8)),
}
