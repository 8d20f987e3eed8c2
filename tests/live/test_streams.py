"""What is taken from a decoder's layers, and which decoders are refused, on ones made for it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from spec_compat.capture.streams import Streams, find_decoder
from torch import Tensor, nn

pytestmark = [pytest.mark.live]

LAYERS, WIDTH = 4, 8
IDS = torch.arange(5)


class Layer(nn.Module):
    """Of the stream x it makes x + f(x); gives out both parts, or their sum alone."""

    def __init__(self, whole: bool) -> None:
        super().__init__()
        self.inner, self.whole = nn.Linear(WIDTH, WIDTH), whole

    def forward(self, hidden: Tensor, residual: Tensor | None) -> Any:
        stream = hidden if residual is None else hidden + residual
        added = self.inner(stream)
        return stream + added if self.whole else (added, stream)


class Decoder(nn.Module):
    def __init__(self, whole: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(len(IDS), WIDTH)
        self.layers = nn.ModuleList(Layer(whole) for _ in range(LAYERS))
        self.norm = nn.RMSNorm(WIDTH)
        nn.init.uniform_(self.norm.weight, 0.5, 1.5)
        self.order = range(LAYERS)
        self.streams: list[Tensor] = []

    def between(self, hidden: Tensor) -> Tensor:
        """What happens to the stream on its way to the next layer."""
        return hidden

    def forward(self, ids: Tensor) -> Tensor:
        hidden, residual = self.embed(ids), None
        self.streams = []
        for number in self.order:
            returned = self.layers[number](self.between(hidden), residual)
            hidden, residual = returned if isinstance(returned, tuple) else (returned, None)
            self.streams.append(hidden if residual is None else hidden + residual)
        return self.last(self.streams[-1])

    def last(self, stream: Tensor) -> Tensor:
        normed: Tensor = self.norm(stream)
        return normed


class Model(nn.Module):
    def __init__(self, decoder: nn.Module, **config: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model, self.config = decoder, SimpleNamespace(**config)

    def forward(self, ids: Tensor) -> Any:
        return self.model(ids)


def run(model: Model, layer_ids: list[int]) -> Streams:
    streams = Streams(model, layer_ids, LAYERS)
    streams.active = True
    for _ in range(2):  # the first step is measured, the others are read
        streams.taken = {}
        with torch.inference_mode():
            model(IDS)
    streams.active = False
    return streams


@pytest.mark.parametrize("whole", [True, False])
def test_the_stream_after_a_layer(whole: bool) -> None:
    torch.manual_seed(1)
    model = Model(Decoder(whole))
    streams = run(model, [0, 2])
    assert streams.reading == ("hidden" if whole else "hidden + residual")
    assert sorted(streams.taken) == [0, 2, 3]
    for layer_id, taken in streams.taken.items():
        assert torch.equal(taken, model.model.streams[layer_id])
    with torch.inference_mode():
        assert torch.equal(streams.norm(streams.taken[3]), model(IDS))


@pytest.mark.parametrize("factor", [None, 3.0])
def test_a_model_may_leave_its_norm_out_or_scale_what_it_gives(factor: float | None) -> None:
    torch.manual_seed(1)
    decoder = Decoder()
    norm, last = decoder.norm, Decoder.last
    decoder.last = (lambda s: s) if factor is None else (lambda s: last(decoder, s) * factor)  # type: ignore[method-assign]
    model = Model(decoder)
    streams = run(model, [0])
    stream = streams.taken[3]
    expected = stream if factor is None else norm(stream) * factor
    torch.testing.assert_close(streams.norm(stream), expected)


def test_nothing_is_taken_of_a_warm_up() -> None:
    model = Model(Decoder())
    streams = Streams(model, [0], LAYERS)
    model(IDS)
    assert (streams.taken, streams.reading) == ({}, "")


def twice(decoder: Decoder) -> None:
    decoder.order = [0, 1, 1, 2, 3]  # type: ignore[assignment]


def other_between(decoder: Decoder) -> None:
    decoder.between = lambda hidden: hidden * 1.5  # type: ignore[method-assign]


def other_norm(decoder: Decoder) -> None:
    decoder.last = lambda stream: decoder.norm(stream.flip(-1))  # type: ignore[method-assign]


def nearly(decoder: Decoder) -> None:
    """Off by more than rounding, and by less than another layer's stream is."""
    decoder.last = lambda stream: decoder.norm(stream + 0.1 * stream.flip(-1))  # type: ignore[method-assign]


def elsewhere(decoder: Decoder) -> None:
    class PPMissingLayer(nn.Identity):
        pass

    decoder.layers[1] = PPMissingLayer()


def without_norm(decoder: Decoder) -> None:
    decoder.closing = decoder.norm  # a name that nobody knows
    decoder.norm = None  # type: ignore[assignment]


def without_layers(decoder: Decoder) -> None:
    decoder.stages = decoder.layers
    del decoder.layers


@pytest.mark.parametrize(
    ("change", "config", "reason"),
    [
        (twice, {}, "Model runs layer 1 twice in a step: it has no one stream"),
        (other_between, {}, r"layer \d is given something else than layer \d returns"),
        (other_norm, {}, r"its layers' streams are not known, for none leads to what the model"),
        (nearly, {}, r"its layers' streams are not known, for none leads to what the model"),
        (elsewhere, {}, "layer 1 of Model is on another pipeline stage: .* use tensor parallelism"),
        (without_norm, {}, "Model.model has no final norm; looked for norm, final_layernorm"),
        (
            without_layers,
            {},
            "Model has no module with 4 decoder layers .* tried Model, Model.model$",
        ),
        (lambda d: None, {"is_encoder_decoder": True}, "its decoder attends to an encoder"),
    ],
)
def test_a_decoder_that_has_no_one_stream_is_refused(
    change: Any, config: dict[str, bool], reason: str
) -> None:
    torch.manual_seed(1)
    decoder = Decoder()
    change(decoder)
    with pytest.raises(ValueError, match=reason) as refused:
        run(Model(decoder, **config), [0, 1, 2])
    assert "\n" not in str(refused.value)


def test_a_wrapper_that_does_not_name_its_language_model_is_walked_into() -> None:
    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.vision_tower, self.language_model = Decoder(), Model(Decoder())

        def get_language_model(self) -> nn.Module:
            raise NotImplementedError  # vLLM's default for a wrapper that names none

    wrapper = Wrapper()
    path, _, layers = find_decoder(wrapper, LAYERS)
    assert path == "Wrapper.language_model.model"
    assert layers is wrapper.language_model.model.layers
    with pytest.raises(ValueError, match=r"Wrapper.language_model.model \(4 layers\)"):
        find_decoder(wrapper, LAYERS + 1)
