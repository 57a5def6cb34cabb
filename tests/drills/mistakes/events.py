"""Mistakes in event logs, their histories, and attention over them."""

from tests.drills.mistakes import Mistake

EVENTS = "loka_jax/data/events.py"
HISTORIES = "loka_jax/nn/histories.py"
INTERFORMER = "loka_jax/models/interformer.py"
SCORES = "loka_jax/pallas/jagged_attention_scores.py"
JAGGED = "loka_jax/jagged.py"
SEQUENCES = "loka_jax/data/sequences.py"

MISTAKES = [
    Mistake(
        "the longest sequence is dealt to the device with most work",
        EVENTS,
        '        turn = np.argsort(np.argsort(load, kind="stable"))\n',
        '        turn = np.argsort(np.argsort(-load, kind="stable"))\n',
        "unit/data/events_test.py",
    ),
    Mistake(
        "a history holds the events of the same time",
        EVENTS,
        "            stops = log.before[anchors]\n",
        "            stops = anchors\n",
        "unit/data/events_test.py",
    ),
    Mistake(
        "a history holds the example itself",
        EVENTS,
        "            stops = log.before[anchors]\n",
        "            stops = anchors + 1\n",
        "unit/data/events_test.py",
    ),
    Mistake(
        "a history begins among the events of another user",
        EVENTS,
        "            starts = np.maximum(log.first[anchors], stops - layout.history)\n",
        "            starts = np.maximum(0, stops - layout.history)\n",
        "unit/data/events_test.py",
    ),
    Mistake(
        "a candidate has its actions",
        SEQUENCES,
        "    ids[rows.is_candidate, ids.shape[1] - layout.actions :] = 0\n",
        "",
        "unit/data/events_test.py",
    ),
    Mistake(
        "rows that are not judged are in no history",
        "loka_jax/predict/files.py",
        "            if config.user is None:\n",
        "            if mask.any():\n",
        "whole/predict/events_test.py",
    ),
    Mistake(
        "events of lists are examples",
        SEQUENCES,
        "        split=np.where(is_example, split, -1).astype(np.int8),\n",
        "        split=split.astype(np.int8),\n",
        "unit/data/unfold_test.py",
    ),
    Mistake(
        "rows with lists have the histories of other rows",
        SEQUENCES,
        "    return is_example, np.cumsum(is_example) - is_example\n",
        "    return is_example, np.cumsum(is_example)\n",
        "unit/data/unfold_test.py",
    ),
    Mistake(
        "events of lists have the label of their example",
        "loka_jax/data/unfold.py",
        "pa.array(row, mask=~is_example)",
        "pa.array(row)",
        "unit/data/unfold_test.py",
    ),
    Mistake(
        "a candidate has its answers",
        SEQUENCES,
        "    answers[rows.is_candidate | ~rows.is_event] = 0\n",
        "    answers[~rows.is_event] = 0\n",
        "unit/data/events_test.py",
    ),
    Mistake(
        "the age of a row is the time until the event after it",
        SEQUENCES,
        "    before = np.where(rows.is_last, ends[of], rows.event) - 1\n",
        "    before = np.where(rows.is_last, ends[of], rows.event + 2) - 1\n",
        "unit/data/events_test.py",
    ),
    Mistake(
        "positions count from the end of a window",
        SEQUENCES,
        "    return np.where(rows.is_last, first, rows.place), ages\n",
        "    return first - rows.place, ages\n",
        "unit/data/events_test.py",
    ),
    Mistake(
        "the newest events of a history are left out",
        EVENTS,
        "            starts=stops - counts,\n",
        "            starts=starts,\n",
        "unit/data/events_test.py",
    ),
    Mistake(
        "candidates have those of their time in their history",
        SEQUENCES,
        "    ends = np.searchsorted(of_past, of_new[first])",
        "    ends = np.searchsorted(of_past, of_new[first], 'right')",
        "unit/data/candidates_test.py",
    ),
    Mistake(
        "events of one time are ordered by chance",
        EVENTS,
        "    if (ties := log.before != np.arange(len(log.before))).any():\n",
        "    if (ties := log.before != np.arange(len(log.before))).all():\n",
        "unit/data/events_test.py",
    ),
    Mistake(
        "rows of the context see what is to be predicted",
        SEQUENCES,
        "    has_contextual = layout.contexts and not layout.is_all\n",
        "    has_contextual = layout.contexts\n",
        "unit/data/events_test.py",
    ),
    Mistake(
        "candidates see each other",
        JAGGED,
        "    last = jnp.minimum(p.row + 1, p.history_end)\n",
        "    last = p.row + 1\n",
        "whole/ops/jagged_attention_test.py",
    ),
    Mistake(
        "rows see a later row of their sequence",
        JAGGED,
        "    last = jnp.minimum(p.row + 1, p.history_end)\n",
        "    last = jnp.minimum(p.row + 2, p.history_end)\n",
        "whole/ops/jagged_attention_test.py",
    ),
    Mistake(
        "softmax keeps its sum when a larger score is found",
        "loka_jax/xla/jagged_softmax.py",
        "    total = total * kept + ",
        "    total = total + ",
        "whole/ops/softmax_attention_test.py",
    ),
    Mistake(
        "the softmax kernel keeps what it summed when a larger score is found",
        SCORES,
        "            own[...] = own[...] * tiles.per_row(share, own.shape[1])\n",
        "            own[...] = own[...]\n",
        "whole/pallas/jagged_softmax_test.py",
    ),
    Mistake(
        "hidden scores have a part in the largest one",
        SCORES,
        "        scores = seen([scores * (self.layout.scale * _LOG2_E)], hidden=-math.inf)\n",
        "        scores = [scores * (self.layout.scale * _LOG2_E)]\n",
        "whole/pallas/jagged_softmax_test.py",
    ),
    Mistake(
        "lse and delta are written over while they are read",
        SCORES,
        "        plgpu.commit_smem()  # all threads have read them\n",
        "",
        "whole/pallas/jagged_softmax_test.py",
    ),
    Mistake(
        "rows leave out the last keys before tokens",
        JAGGED,
        "    nowhere = 2**30  # after",
        "    nowhere = max(queries, keys) + new_keys  # after",
        "whole/ops/softmax_attention_test.py",
    ),
    Mistake(
        "tokens see the row of the event that they predict",
        HISTORIES,
        "    end = jnp.where(is_target, reach, num_rows)\n",
        "    end = jnp.where(is_target, reach + 1, num_rows)\n",
        "whole/models/onetrans_test.py",
    ),
    Mistake(
        "keys of a history are not turned by their places",
        INTERFORMER,
        "to_end = sequences.lengths[sequences.of] - sequences.place\n",
        "to_end = 0 * sequences.place\n",
        "whole/models/interformer_test.py",
    ),
    Mistake(
        "a short history has its summary of features as its newest rows",
        HISTORIES,
        "age < self.lengths[:, None] - after\n",
        "age < self.lengths[:, None]\n",
        "whole/models/interformer_test.py",
    ),
    Mistake(
        "the first row has gradients of places without a row",
        "loka_jax/ops/distinct_rows.py",
        "jnp.where(rows < 0, count, rows)",
        "jnp.maximum(rows, 0)",
        "unit/ops/distinct_rows_test.py",
    ),
    Mistake(
        "candidates that change the rows of their history share it",
        SEQUENCES,
        "    most = 1 if layout.one_candidate else most\n",
        "",
        "unit/data/candidates_test.py",
    ),
]
