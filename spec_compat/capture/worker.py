"""What runs in vLLM's worker: steps whose rows are captured, and what the driver calls for them."""

from __future__ import annotations

from typing import Any

from spec_compat.capture.orders import Answer, Order, Storage
from spec_compat.capture.sink import Place, Sink
from spec_compat.capture.streams import Streams


def batch_order(runner: Any) -> list[str]:
    """Request ids in the order in which a step, before it is sampled, has their tokens."""
    if hasattr(runner, "input_batch"):
        return list(runner.input_batch.req_ids)
    return list(runner.execute_model_state.input_batch.req_ids)  # the V2 model runner


class LayerCapture:
    """Takes the streams of `layer_ids` in one worker, in steps that come with an order.

    Only tensor-parallel rank 0 keeps rows; the others take part in the proof, whose logits are
    gathered from all ranks. A step without an order, as in a warm-up, is left alone.
    """

    def __init__(self, runner: Any, layer_ids: list[int], *, keep: bool) -> None:
        self.runner = runner
        self.layer_ids = list(layer_ids) if keep else []
        num_layers = runner.model_config.get_num_layers(runner.parallel_config)
        self.streams = Streams(runner.model, self.layer_ids, num_layers)
        self.sink: Sink | None = None
        self.order: Order | None = None
        self._execute = runner.execute_model
        runner.execute_model = self.execute_model

    def execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        if self.order is None:
            return self._execute(scheduler_output, *args, **kwargs)
        self.streams.active = True
        output = self._execute(scheduler_output, *args, **kwargs)
        self.streams.active = False
        self._hand_over(self._places(scheduler_output, self.order), self.order)
        self.streams.taken = {}
        return output

    def _places(self, step: Any, order: Order) -> list[Place]:
        places, start = [], 0
        for request_id in batch_order(self.runner):
            number = order.numbers[request_id]
            stop = start + step.num_scheduled_tokens[request_id]
            if stop - start != len(order.rows[number].ids):
                raise RuntimeError(f"row {number} was computed in more than one step")
            places.append(Place(request_id, number, start, stop))
            start = stop
        return places

    def _hand_over(self, places: list[Place], order: Order) -> None:
        """Give the sink the streams of the layers, and the logits that prove each row."""
        import torch

        last = self.streams.taken[self.streams.last]
        ends = torch.tensor([place.stop - 1 for place in places]).to(last.device, non_blocking=True)
        logits = self.runner.model.compute_logits(self.streams.norm(last[ends]))
        if self.sink is not None and self.layer_ids:
            states = [self.streams.taken[layer_id] for layer_id in self.layer_ids]
            self.sink.take(order, places, states, logits)


def open_sink(worker: Any, storage: Storage, tokens: int, buffers: int | None) -> None:
    """In a worker whose capture is set up: the rows of later steps go to this storage.

    `tokens` is the most that a step has, `buffers` the number of steps that the host holds.
    """
    worker._capture.sink = Sink(storage, tokens, buffers)


def extract(worker: Any, scheduler_output: Any, order: Order) -> Answer:
    """In a worker: compute one step, and see to its rows."""
    capture: LayerCapture = worker._capture
    sink = capture.sink
    if sink is None:
        raise RuntimeError("a step with an order came before the sink was opened")
    capture.order = order
    try:
        output = worker.execute_model(scheduler_output)
        sink.release()  # the step before
        output = worker.sample_tokens(None) if output is None else output
        sink.sampled(output)
    finally:
        capture.order = None
    return sink.answer()


def drain(worker: Any) -> Answer:
    """In a worker: wait for the last row."""
    answer: Answer = worker._capture.sink.drain()
    return answer
