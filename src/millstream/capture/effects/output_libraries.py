"""The one list of libraries whose calls are outputs of a step."""

_OF_WRITERS = (
    "add_scalar add_scalars add_histogram add_image add_images add_figure add_text add_embedding add_hparams flush"
)

REGISTERED: tuple[tuple[str, str, str], ...] = (
    (
        "tqdm.std",
        "tqdm",
        "update set_description set_description_str set_postfix set_postfix_str refresh clear reset write close",
    ),
    ("torch.utils.tensorboard.writer", "SummaryWriter", _OF_WRITERS),
    ("tensorboardX", "SummaryWriter", _OF_WRITERS),
    ("wandb", "", "log alert"),
    ("wandb.sdk.wandb_run", "Run", "log alert"),
    ("mlflow", "", "log_metric log_metrics log_param log_params log_text set_tag"),
)
"""Module, class in it or nothing, names of functions: what they return, nobody needs. Used where it is imported."""

PACKAGES = frozenset(module.partition(".")[0] for module, _, _ in REGISTERED) - {"torch"}
"""What their objects hold is none of a step's."""
