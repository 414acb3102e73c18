"""An OpenVINO model that keeps keys and values in states of its own: for models that paged attention cannot compute.

    inputs    input_ids [1, n], attention_mask [1, past + n], position_ids [1, n], beam_idx [1], rows
    states    of each layer, keys and values of `past` tokens along one axis

Every sequence has an infer request, whose states grow by the tokens of each forward. The entries of rejected tokens are
behind all others, since drafts are chains; they are cut off before the next forward. A forward reads one sequence after
the other. States that do not grow with the text, those of recurrent layers, cannot be cut, and are refused.

Knows neither sessions nor trees.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import openvino as ov

from leapahead.core.errors import BadParameter, LeapaheadError, Refused
from leapahead.models.openvino import tracks
from leapahead.models.openvino.compiled import CompiledModel, Part, cause, run
from leapahead.models.openvino.options import OpenVinoOptions

INPUTS = {"input_ids", "attention_mask", "position_ids", "beam_idx"}


@dataclass(eq=False)
class Track(tracks.Track):
    """What the cache holds of one sequence.

    Attributes:
        request: whose states are those of the sequence.
        held: greatest number of tokens whose entries are in the states: the committed ones, and what the last forward
            wrote, or failed to write.
    """

    request: Any = None
    held: int = 0


class States(tracks.Cache[Track]):
    """The states of all sequences.

    Args:
        compiled: the model.
        axes: of each state, by its name, the axis of the tokens.
        limit: greatest number of committed tokens, all sequences together; the nodes of a step come on top.
    """

    def __init__(self, compiled: Any, axes: dict[str, int], limit: int) -> None:
        super().__init__(limit)
        self._compiled, self._axes = compiled, axes
        self._unused: list[Any] = []  # requests with empty states

    def forget(self) -> None:
        super().forget()
        self._unused.clear()

    def extend(self, tracks: Sequence[Track], counts: Sequence[int]) -> None:
        self._check_room()
        while self._idle and sum(each.length for each in (*self._idle, *self.open)) + sum(counts) > self.limit:
            self._drop(self._idle[0])

    def keep(self, track: Track, slots: Sequence[int]) -> None:
        """Commits the first pending entries; the others are cut off when the next forward begins."""
        assert tuple(slots) == tuple(range(len(slots))), "the entries of a chain follow each other"
        assert len(slots) <= track.pending, "commit without a step"
        track.length += len(slots)
        track.pending = 0

    def discard(self, track: Track) -> None:
        track.pending = 0

    def cut(self, track: Track, length: int) -> None:
        """Discards the entries behind the first `length`."""
        if track.held > length > 0:
            self._copy(track, track, length)
        elif track.held > length:
            track.request.reset_state()  # states that nothing was written to cannot be read

    def _new(self, tokens: list[int], reserve: int, owner: str) -> Track:
        request = self._unused.pop() if self._unused else self._compiled.create_infer_request()
        return Track(tokens, reserve=reserve, owner=owner, request=request)

    def _share(self, track: Track, source: Track, shared: int) -> None:
        if shared:  # reading states that nothing was written to ends the process
            self._copy(source, track, shared)
        track.length = shared
        track.top_k = source.top_k and source.top_k.between(0, shared)

    def _clear(self, track: Track) -> None:
        track.request.reset_state()
        self._unused.append(track.request)

    def _copy(self, source: Track, goal: Track, length: int) -> None:
        """Gives `goal` the entries of the first `length` tokens of `source`."""
        into = {state.name: state for state in goal.request.query_state()}
        for state in source.request.query_state():
            entries, axis = state.state, self._axes[state.name]
            shape = list(entries.shape)
            shape[axis] = length
            part = ov.Tensor(entries.element_type, ov.Shape(shape))
            ov.Tensor(entries, ov.Coordinate([0] * len(shape)), ov.Coordinate(shape)).copy_to(part)
            into[state.name].state = part
        goal.held = length


class StatefulModel(CompiledModel):
    """A model with states, compiled as it is.

    Args:
        file: openvino_model.xml of an exported model.
        options: how it is compiled.

    Raises:
        BadParameter: the file cannot be read.
        Refused: it has other states than keys and values, or inputs that are not known here.
    """

    trees: ClassVar[bool] = False
    bucket: ClassVar[int] = 1  # the states grow with every forward, so that no forward is like the last one
    token_axis: ClassVar[int] = 1

    def count(self, options: OpenVinoOptions) -> int:
        if options.copies > 1:
            raise BadParameter(
                f"copies={options.copies} is not possible for {str(self.file)!r}, which OpenVINO cannot give paged "
                "attention: it is decoded by its own states and compiled once; leave out copies"
            )
        return 1

    def prepare(self, graph: Any) -> None:
        inputs = {port.get_any_name() for port in graph.inputs}
        if unknown := sorted(inputs - INPUTS) or sorted({"input_ids"} - inputs):
            raise Refused(
                f"the model {str(self.file)!r} cannot be decoded: its input {unknown[0]!r} is not known; load the "
                "model with Transformers, or as a GGUF file with llama.cpp"
            )
        self._given = inputs
        kept = [node for node in graph.get_ops() if node.get_type_name() == "ReadValue"]
        self._axes, numbers = dict[str, int](), 0
        for node in kept:
            shape = node.get_output_partial_shape(0)
            dynamic = [axis for axis in range(1, len(shape)) if shape[axis].is_dynamic] if shape.rank.is_static else []
            if len(dynamic) != 1:
                break
            self._axes[node.get_variable_id()] = dynamic[0]
            numbers += int(np.prod([shape[axis].get_length() for axis in range(1, len(shape)) if axis != dynamic[0]]))
        if not kept or len(self._axes) < len(kept):
            raise Refused(
                f"the model {str(self.file)!r} cannot be decoded: it has "
                + ("states that do not grow with the text, such as those of recurrent layers" if kept else "no states")
                + "; load the model with Transformers, or as a GGUF file with llama.cpp"
            )
        self._numbers = numbers

    def measure(self) -> None:
        self.layers = len(self._axes) // 2
        self.bytes_per_token = 4 * self._numbers  # states are float32 outside of OpenVINO's own attention

    def new_cache(self, limit: int) -> States:
        return States(self.compiled, self._axes, limit)

    def forward(
        self, cache: States, parts: Sequence[Part], rows: Sequence[int], drafts: bool = False
    ) -> tuple[Any, Any]:
        found, begin = [], 0
        for part in parts:
            end = begin + len(part.tokens)
            found.append(self._one(cache, part, [row - begin for row in rows if begin <= row < end]))
            begin = end
        if len(found) == 1:
            return found[0]
        logits, hidden = zip(*found, strict=True)
        return np.concatenate(logits), np.concatenate(hidden)

    def _one(self, cache: States, part: Part, rows: Sequence[int]) -> tuple[Any, Any]:
        """The forward of one sequence; at least one row is computed."""
        track, count = part.track, len(part.tokens)
        inputs = {
            "input_ids": np.array([part.tokens], np.int64),
            "attention_mask": np.ones((1, part.past + count), np.int64),
            "position_ids": np.array([part.positions], np.int64),
            "beam_idx": np.zeros(1, np.int32),
            "rows": np.array(rows or [0], np.int64),
        }
        try:
            cache.cut(track, part.past)
            for name in (*self._given, "rows"):
                track.request.set_tensor(name, ov.Tensor(inputs[name]))
            track.held = part.past + count  # at least so many after an interrupt
            run(track.request)
        except RuntimeError as error:
            raise LeapaheadError(f"OpenVINO could not compute a forward of {count} tokens: {cause(error)}") from None
        logits, hidden = self.outputs(track.request)
        return logits[: len(rows)], hidden
