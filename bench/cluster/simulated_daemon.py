"""A daemon that computes nothing: it answers with the right shapes after a fixed time.

The services are the real ones. The simulated device serves one attend at a time, and each takes
the fixed time; others wait. The device time that an attend reports does not include this wait.
So the rest of the time that a client measures is the transport and the wait. Only the lengths of
appended rows are kept.
"""

from __future__ import annotations

import argparse
import asyncio
import queue
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import grpc
from google.protobuf import message_factory
from spillway_kv._proto import (
    admin_service_pb2,
    attention_service_pb2,
    model_service_pb2,
    sequence_service_pb2,
)
from spillway_kv.tensors import dtype_number

_VERSION = "0.1.0"
_F32 = dtype_number("float32")


class Device:
    """Serves one attend at a time, in the order in which they arrive."""

    def __init__(self, seconds: float, loop: asyncio.AbstractEventLoop) -> None:
        self._seconds, self._loop = seconds, loop
        self._jobs: queue.SimpleQueue[tuple[float, Any]] = queue.SimpleQueue()
        threading.Thread(target=self._serve, daemon=True).start()

    def submit(self, done: Any) -> None:
        """Calls `done` on the loop when the attend is over."""
        self._jobs.put((time.perf_counter(), done))

    def _serve(self) -> None:
        end = 0.0
        while True:
            came, done = self._jobs.get()
            # An attend that waited begins when the last one ended, even if this thread woke late.
            end = max(came, end) + self._seconds
            left = end - time.perf_counter()
            if left > 0:
                time.sleep(left)
            self._loop.call_soon_threadsafe(done)


class Services:
    """All calls that a client needs to decode."""

    def __init__(self, device: Device, seconds: float) -> None:
        self._device = device
        self._seconds = seconds
        self._boot_id = secrets.token_hex(16)
        self._models: dict[str, model_service_pb2.Model] = {}
        self._sequences: dict[str, sequence_service_pb2.Sequence] = {}
        # Results by model, query count and output type, which determine the whole result.
        self._answers: dict[tuple[str, int, int], attention_service_pb2.AttendResult] = {}

    # The daemon.

    async def GetServerInfo(self, request: Any, context: Any) -> Any:
        info = admin_service_pb2.GetServerInfoResponse(
            version=_VERSION, boot_id=self._boot_id, page_token_count=128
        )
        info.devices.add(name="cpu:0", description="simulated", thread_count=1)
        limits = info.limits
        limits.message_bytes_max, limits.memory_bytes_max = 4 << 20, 1 << 40
        limits.query_token_count_max, limits.sparse_query_token_count_max = 8192, 16
        limits.attend_item_count_max, limits.sequence_count_max = 256, 1 << 20
        return info

    async def Connect(self, request: Any, context: Any) -> AsyncIterator[Any]:
        yield sequence_service_pb2.ConnectResponse()
        await asyncio.Event().wait()

    # Models and sequences.

    async def CreateModel(self, request: Any, context: Any) -> Any:
        model = model_service_pb2.Model()
        model.CopyFrom(request.model)
        model.name = f"models/{request.model_id or secrets.token_hex(8)}"
        model.ready = True
        if model.name in self._models:
            await context.abort(grpc.StatusCode.ALREADY_EXISTS, f"{model.name} exists")
        self._models[model.name] = model
        return model_service_pb2.CreateModelResponse(model=model)

    async def GetModel(self, request: Any, context: Any) -> Any:
        if request.name not in self._models:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"there is no {request.name}")
        return model_service_pb2.GetModelResponse(model=self._models[request.name])

    async def CreateSequence(self, request: Any, context: Any) -> Any:
        sequence = sequence_service_pb2.Sequence()
        sequence.CopyFrom(request.sequence)
        sequence.name = f"sequences/{request.sequence_id or secrets.token_hex(8)}"
        if sequence.model not in self._models:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"there is no {sequence.model}")
        sequence.generation = 1
        sequence.layer_token_counts.extend([0] * self._models[sequence.model].layer_count)
        self._sequences[sequence.name] = sequence
        return sequence_service_pb2.CreateSequenceResponse(sequence=sequence)

    async def GetSequence(self, request: Any, context: Any) -> Any:
        sequence = await self._found(request.name, context)
        return sequence_service_pb2.GetSequenceResponse(sequence=sequence)

    async def DeleteSequence(self, request: Any, context: Any) -> Any:
        del self._sequences[(await self._found(request.name, context)).name]
        return sequence_service_pb2.DeleteSequenceResponse()

    async def _found(self, name: str, context: Any) -> sequence_service_pb2.Sequence:
        if name not in self._sequences:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"there is no {name}")
        return self._sequences[name]

    # Attention.

    async def Append(self, requests: AsyncIterator[Any], context: Any) -> Any:
        response = attention_service_pb2.AppendResponse()
        async for request in requests:
            chunk = request.chunk
            sequence = await self._found(chunk.sequence, context)
            for layer in range(chunk.layer_start, chunk.layer_start + chunk.k.shape[0]):
                self._appended(sequence, layer, chunk.token_start + chunk.k.shape[2])
            response.appended_chunk_count += 1
            response.layer_token_counts[:] = sequence.layer_token_counts
        return response

    def _appended(self, sequence: Any, layer: int, end: int) -> None:
        sequence.layer_token_counts[layer] = end
        sequence.token_count = min(sequence.layer_token_counts)

    async def Attend(self, request: Any, context: Any) -> Any:
        response = attention_service_pb2.AttendResponse()
        for item in request.items:
            sequence = await self._found(item.sequence, context)
            over = asyncio.Event()
            self._device.submit(over.set)
            await over.wait()
            kind = request.out_dtype or item.q.dtype
            response.results.append(self._answer(sequence.model, item.q.shape[0], kind))
        return response

    async def Step(self, requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        step = attention_service_pb2.DecodeStep()
        async for request in requests:
            if request.HasField("begin"):
                step = request.begin
            if not request.HasField("attend"):
                continue
            attend = request.attend
            kind = attend.out_dtype or attend.q.dtype
            count = attend.q.shape[0]
            response = attention_service_pb2.StepResponse(
                layer=attend.layer, part_start=attend.part_start
            )
            results = []
            for part in step.parts[attend.part_start : attend.part_start + count]:
                sequence = await self._found(part.sequence, context)
                self._appended(sequence, attend.layer, part.token_start + step.token_count)
                results.append(self._answer(sequence.model, step.token_count, kind))
            for result in results:
                response.results.add(certificate=result.certificate, statistics=result.statistics)
            for name in ("out", "lse"):
                tensors = [getattr(result, name) for result in results]
                joined = getattr(response, name)
                joined.dtype = tensors[0].dtype
                joined.shape.extend((count, *tensors[0].shape))
                joined.data = b"".join(each.data for each in tensors)
            over = asyncio.Event()
            self._device.submit(over.set)
            await over.wait()
            yield response

    def _answer(self, name: str, tokens: int, kind: int) -> attention_service_pb2.AttendResult:
        key = name, tokens, kind
        if key not in self._answers:
            model = self._models[name]
            heads, dim = model.query_head_count, model.head_dim
            made = attention_service_pb2.AttendResult()
            made.out.dtype, made.lse.dtype = kind, _F32
            made.out.shape.extend((tokens, heads, dim))
            made.out.data = bytes(tokens * heads * dim * (4 if kind == _F32 else 2))
            made.lse.shape.extend((tokens, heads))
            made.lse.data = bytes(tokens * heads * 4)
            per_head = tokens * heads
            certificate = made.certificate
            for counts in (
                certificate.visible_token_counts,
                certificate.heavy_token_counts,
                certificate.sampled_token_counts,
                made.statistics.touched_row_counts,
            ):
                counts.extend([1000] * per_head)
            certificate.relative_errors.extend([0.01] * per_head)
            certificate.tail_masses.extend([0.1] * per_head)
            certificate.promises.extend([attention_service_pb2.PROMISE_STATISTICAL] * per_head)
            certificate.epsilon, certificate.delta, certificate.inflation = 0.1, 0.05, 1.0
            made.statistics.device_time_us = self._seconds * 1e6
            self._answers[key] = made
        return self._answers[key]


async def serve(target: str, seconds: float) -> None:
    """Serves until cancelled. Prints a line when it is ready."""
    server = grpc.aio.server()
    services: Any = Services(Device(seconds, asyncio.get_running_loop()), seconds)
    for module in (
        admin_service_pb2,
        attention_service_pb2,
        model_service_pb2,
        sequence_service_pb2,
    ):
        (service,) = module.DESCRIPTOR.services_by_name.values()
        server.add_generic_rpc_handlers((_handler(service, services),))
    server.add_insecure_port(target)
    await server.start()
    print("serves", flush=True)
    await server.wait_for_termination()


def _handler(service: Any, services: Services) -> grpc.GenericRpcHandler:
    """Serves the calls of a service that are simulated. Others answer UNIMPLEMENTED."""
    handlers = {}
    for method in service.methods:
        simulated = getattr(services, method.name, None)
        if simulated is None:
            continue
        asks = "stream" if method.client_streaming else "unary"
        answers = "stream" if method.server_streaming else "unary"
        handlers[method.name] = getattr(grpc, f"{asks}_{answers}_rpc_method_handler")(
            simulated,
            request_deserializer=message_factory.GetMessageClass(method.input_type).FromString,
            response_serializer=message_factory.GetMessageClass(
                method.output_type
            ).SerializeToString,
        )
    return grpc.method_handlers_generic_handler(service.full_name, handlers)


@contextmanager
def simulated_daemons(folder: Path, count: int, seconds: float) -> Iterator[list[str]]:
    """Starts `count` simulated daemons, one process each, and yields their targets."""
    with ExitStack() as stack:
        targets = [f"unix:{folder}/simulated-{number}.sock" for number in range(count)]
        started = []
        for target in targets:
            process = subprocess.Popen(
                [sys.executable, __file__, target, str(seconds)], stdout=subprocess.PIPE
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
            started.append(process)
        for target, process in zip(targets, started, strict=True):
            assert process.stdout is not None
            if process.stdout.readline() != b"serves\n":
                raise RuntimeError(f"the simulated daemon at {target} does not serve")
            process.stdout.close()
        yield targets


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", help="where it listens, such as unix:/tmp/simulated.sock")
    parser.add_argument("seconds", type=float, help="that an attend takes on the device")
    arguments = parser.parse_args()
    asyncio.run(serve(arguments.target, arguments.seconds))


if __name__ == "__main__":
    main()
