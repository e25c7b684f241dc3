"""massieu: transformers as probability.

One object carries the whole package: a measure h on R^d and its log-partition

    A(eta) = log ∫ exp(u(x)·eta) h(dx).

With h the keys of an attention layer and eta its query, attention is ``∇A``; masks, position biases and sinks are
log-weights of h; the entropy, the Fisher information and the KL divergence of attention are derivatives and Bregman
divergences of A. François Massieu's function is log Z read as a thermodynamic potential; the package is what follows.

Three doors:

- see: ``massieu.probe(model, massieu.Text(paths, tokenizer))`` or the command ``massieu probe MODEL``; the attention matrix
  of a head on a prompt by ``massieu.attention_weights`` or ``massieu attention MODEL "a prompt" --head 5.1``; statistics of
  your own by ``massieu.statistic``, with what ``massieu.probing`` gives their functions;
- build: ``massieu.nn`` (modules), ``massieu.ops`` (attention that also returns log Z), ``massieu.energy`` (memories and
  machines), ``massieu.measures`` (any h, with what follows from it), ``massieu.duality`` (from a mean back to its natural
  parameter), ``massieu.population`` (tokens as particles under layers), ``massieu.posteriors`` (exact laws of a latent given
  tokens), ``massieu.regression`` (conditional means), ``massieu.solve`` and ``massieu.inference``; ``massieu.testing`` tests
  your own measures; ``massieu.sklearn`` (estimators for scikit-learn users);
- check: ``massieu.papers.verify()`` or the command ``massieu verify``: every claim of the papers, with numbers;
  ``massieu.papers.theory`` (what is proved of ideal cases, as functions).

Importing this module loads neither torch nor transformers; names are loaded when they are first used.
"""

from typing import TYPE_CHECKING

from massieu.foundation.lazy_names import lazy_names

__version__ = "0.1.0"

if TYPE_CHECKING:
    from massieu import (
        duality,
        energy,
        inference,
        measures,
        nn,
        ops,
        papers,
        population,
        posteriors,
        probing,
        regression,
        report,
        sklearn,
        solve,
        testing,
    )
    from massieu.errors import InputError, MissingExtraError
    from massieu.nn.replace import replace_attention
    from massieu.probing.compare.comparison import Comparison
    from massieu.probing.compare.run import compare
    from massieu.probing.data.given import Batches, Images, Pairs, Text
    from massieu.probing.model.given import Checkpoint
    from massieu.probing.monitor.monitor import Monitor
    from massieu.probing.population_layers import population_layers
    from massieu.probing.replaced.context import replaced
    from massieu.probing.replaced.replacement import Replacement
    from massieu.probing.result.result import ProbeResult
    from massieu.probing.run import describe, probe
    from massieu.probing.session.run import Run
    from massieu.probing.statistics.group import Group
    from massieu.probing.statistics.own import statistic
    from massieu.probing.weights.attention_weights import attention_weights

_SOURCES = {
    "attention_weights": "massieu.probing.weights.attention_weights:attention_weights",
    "compare": "massieu.probing.compare.run:compare",
    "duality": "massieu.duality",
    "energy": "massieu.energy",
    "inference": "massieu.inference",
    "measures": "massieu.measures",
    "nn": "massieu.nn",
    "ops": "massieu.ops",
    "papers": "massieu.papers",
    "population": "massieu.population",
    "population_layers": "massieu.probing.population_layers:population_layers",
    "posteriors": "massieu.posteriors",
    "probing": "massieu.probing",
    "regression": "massieu.regression",
    "replace_attention": "massieu.nn.replace:replace_attention",
    "replaced": "massieu.probing.replaced.context:replaced",
    "report": "massieu.report",
    "sklearn": "massieu.sklearn",
    "solve": "massieu.solve",
    "testing": "massieu.testing",
    "Group": "massieu.probing.statistics.group:Group",
    "Monitor": "massieu.probing.monitor.monitor:Monitor",
    "statistic": "massieu.probing.statistics.own:statistic",
    "probe": "massieu.probing.run:probe",
    "describe": "massieu.probing.run:describe",
    "Batches": "massieu.probing.data.given:Batches",
    "Checkpoint": "massieu.probing.model.given:Checkpoint",
    "Images": "massieu.probing.data.given:Images",
    "Pairs": "massieu.probing.data.given:Pairs",
    "Replacement": "massieu.probing.replaced.replacement:Replacement",
    "Run": "massieu.probing.session.run:Run",
    "Text": "massieu.probing.data.given:Text",
    "Comparison": "massieu.probing.compare.comparison:Comparison",
    "ProbeResult": "massieu.probing.result.result:ProbeResult",
    "InputError": "massieu.errors:InputError",
    "MissingExtraError": "massieu.errors:MissingExtraError",
}

__all__ = [
    "Batches",
    "Checkpoint",
    "Comparison",
    "Group",
    "Images",
    "InputError",
    "MissingExtraError",
    "Monitor",
    "Pairs",
    "ProbeResult",
    "Replacement",
    "Run",
    "Text",
    "attention_weights",
    "compare",
    "describe",
    "duality",
    "energy",
    "inference",
    "measures",
    "nn",
    "ops",
    "papers",
    "population",
    "population_layers",
    "posteriors",
    "probe",
    "probing",
    "regression",
    "replace_attention",
    "replaced",
    "report",
    "sklearn",
    "solve",
    "statistic",
    "testing",
]

__getattr__, __dir__ = lazy_names(__name__, __all__, _SOURCES)
