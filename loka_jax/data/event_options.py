"""Which options of data go with an event log."""

from typing import TYPE_CHECKING

from loka_jax.options import require

if TYPE_CHECKING:
    from loka_jax.data.config import DataConfig

HISTORY = "history"  # the column of examples with lists that tells them from events


def check_events(config: "DataConfig") -> None:
    """Raises ValueError for an option that does not fit an event log."""
    require(
        config.kind != "events" or len(config.rows) == 2,
        "--data.rows",
        config.rows,
        "the rows of two tables, of contexts and of items",
    )
    if not config.is_log:
        for name in ("context", "actions", "interleave", "row_capacity", "stream"):
            option = f"--data.{name.replace('_', '-')}"
            if getattr(config, name):
                raise ValueError(f"{option} is of event logs: name --data.user.")
        return
    if config.lists:
        _check_lists(config)
    if config.kind == "table" and config.time is None:
        raise ValueError(
            "--data.user makes the rows events, which need an order: name a column "
            "of times or positions with --data.time."
        )
    by_column = any("=" in entry for entry in config.transform)
    if config.dense or config.multi or by_column or config.keep_negatives < 1:
        raise ValueError(
            "An event log has no --data.dense or --data.multi columns, no "
            "--data.transform of a column, and keeps all rows: leave out these, and "
            "--data.keep-negatives."
        )
    if config.targets == "all" and (config.stream or config.row_capacity):
        raise ValueError(
            "--data.stream and --data.row-capacity need an example a sequence: "
            "set --data.targets last."
        )


def _check_lists(config: "DataConfig") -> None:
    """Raises ValueError if `lists` are not those of events."""
    events = (*config.categorical, config.time)
    if lacking := [name for name in events if name not in config.lists_of]:
        raise ValueError(
            f"--data.lists has no list of {lacking[0] or 'times'!r}: name one for "
            "each column of --data.categorical and for --data.time."
        )
    if config.user is not None or config.targets == "all":
        raise ValueError(
            "--data.lists give each row a history and an example: leave out "
            "--data.user, and set --data.targets last."
        )
    fields = *config.context, *config.categorical, *config.actions
    if HISTORY in fields:
        raise ValueError(
            f"Column {HISTORY!r} has a name that --data.lists need: rename it."
        )
