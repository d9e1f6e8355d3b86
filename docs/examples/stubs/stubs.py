"""A client made of the stubs that protoc generates: appends a prompt, attends, decodes a token.

    python stubs.py HOST:PORT AUTHORITY.pem TOKEN

README.md beside this file says how the stubs are made. It needs grpcio, protobuf and numpy.
"""

import sys

import grpc
import numpy as np
from spillway.v1 import (
    attention_service_pb2,
    attention_service_pb2_grpc,
    model_service_pb2,
    model_service_pb2_grpc,
    policy_pb2,
    sequence_service_pb2,
    sequence_service_pb2_grpc,
    tensor_pb2,
)

TOKENS, QUERY_HEADS, KV_HEADS, DIM = 3000, 4, 2, 64


def tensor(array: np.ndarray) -> tensor_pb2.Tensor:
    """Makes the message of a float32 array: little endian, in C order."""
    data = np.ascontiguousarray(array, "<f4").tobytes()
    return tensor_pb2.Tensor(dtype=tensor_pb2.DTYPE_F32, shape=array.shape, data=data)


def array(message: tensor_pb2.Tensor) -> np.ndarray:
    """Returns the float32 array of a message."""
    return np.frombuffer(message.data, "<f4").reshape(message.shape)


def main(target: str, authority: str, token: str) -> None:
    """Runs the program."""
    with open(authority, "rb") as file:
        credentials = grpc.ssl_channel_credentials(file.read())
    said = (("authorization", f"Bearer {token}"),)
    rng = np.random.default_rng(0)
    k, v = rng.standard_normal((2, KV_HEADS, TOKENS + 1, DIM), np.float32)
    with grpc.secure_channel(target, credentials) as channel:
        models = model_service_pb2_grpc.ModelServiceStub(channel)
        sequences = sequence_service_pb2_grpc.SequenceServiceStub(channel)
        attention = attention_service_pb2_grpc.AttentionServiceStub(channel)

        model = model_service_pb2.Model(
            layer_count=1,
            query_head_count=QUERY_HEADS,
            kv_head_count=KV_HEADS,
            head_dim=DIM,
            dtype=tensor_pb2.DTYPE_F32,
            hash_weights=model_service_pb2.HashWeights(rotation={}),
        )
        model = models.CreateModel(
            model_service_pb2.CreateModelRequest(model=model), timeout=60, metadata=said
        ).model
        sequence = sequences.CreateSequence(
            sequence_service_pb2.CreateSequenceRequest(
                sequence=sequence_service_pb2.Sequence(model=model.name)
            ),
            timeout=60,
            metadata=said,
        ).sequence

        # The prompt: K and V [layers, H_kv, T, d]. A message has at most 4 MiB, so longer prompts
        # are cut by layers and tokens.
        chunk = attention_service_pb2.KvChunk(
            sequence=sequence.name, k=tensor(k[None, :, :TOKENS]), v=tensor(v[None, :, :TOKENS])
        )
        requests = iter([attention_service_pb2.AppendRequest(chunk=chunk)])
        attention.Append(requests, timeout=60, metadata=said)

        # Each query head looks for one of its keys.
        q = np.repeat(k[:, 1234], QUERY_HEADS // KV_HEADS, axis=0)
        item = attention_service_pb2.AttendItem(sequence=sequence.name, q=tensor(q[None]))
        answer = attention.Attend(
            attention_service_pb2.AttendRequest(items=[item]), timeout=60, metadata=said
        )
        found = answer.results[0].certificate.relative_errors[0]
        print(f"attended to {TOKENS} tokens; certified error of head 0: {found:.4f}")

        # A decode step: it begins once, and then each layer is one message, for all sequences
        # of the batch. This one reads all rows.
        step = attention_service_pb2.DecodeStep(
            parts=[
                attention_service_pb2.DecodeStep.Part(
                    sequence=sequence.name, token_start=TOKENS, generation=sequence.generation
                )
            ],
            token_count=1,
            policy=policy_pb2.Policy(selector=policy_pb2.SELECTOR_ALL),
        )
        layer = attention_service_pb2.StepAttend(
            layer=0,
            q=tensor(q[None, None]),
            k=tensor(k[None, :, TOKENS].reshape(1, 1, KV_HEADS, DIM)),
            v=tensor(v[None, :, TOKENS].reshape(1, 1, KV_HEADS, DIM)),
        )
        messages = iter(
            [
                attention_service_pb2.StepRequest(begin=step),
                attention_service_pb2.StepRequest(attend=layer),
            ]
        )
        for response in attention.Step(messages, timeout=60, metadata=said):
            if response.status.code:
                sys.exit(f"layer {response.layer}: {response.status.message}")
            out = array(response.out)[0, 0]
        rows = np.repeat(k, QUERY_HEADS // KV_HEADS, axis=0).astype(float)
        weights = np.exp(np.einsum("htd,hd->ht", rows, q) / DIM**0.5)
        weights /= weights.sum(axis=1, keepdims=True)
        wanted = np.einsum("ht,htd->hd", weights, np.repeat(v, QUERY_HEADS // KV_HEADS, axis=0))
        print(
            f"decoded token {TOKENS}; largest difference from numpy: {abs(out - wanted).max():.1e}"
        )

        sequences.DeleteSequence(
            sequence_service_pb2.DeleteSequenceRequest(name=sequence.name),
            timeout=60,
            metadata=said,
        )
        models.DeleteModel(
            model_service_pb2.DeleteModelRequest(name=model.name), timeout=60, metadata=said
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
