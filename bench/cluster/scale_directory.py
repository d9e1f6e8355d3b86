"""Measures how many calls a second a directory answers: the part `directory` of scale.py."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable
from typing import Any

import ray
from spillway_kv.cluster.actors import DirectoryActor
from spillway_kv.cluster.records import DaemonRecord


def per_second(call: Callable[[int], Any], seconds: float = 2.0) -> float:
    end, count = time.perf_counter() + seconds, 0
    begin = time.perf_counter()
    while time.perf_counter() < end:
        call(count)
        count += 1
    return round(count / (time.perf_counter() - begin), 1)


@ray.remote(num_cpus=0)
class Caller:
    """Calls a directory as fast as it answers."""

    def rate(self, actor: Any, method: str, arguments: tuple[Any, ...], seconds: float) -> float:
        return per_second(lambda _: ray.get(actor.call.remote(method, arguments, {})), seconds)


def directory() -> dict[str, Any]:
    """Measures how many calls one directory, an actor on Ray, answers, with 100 daemons in it."""
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        actor = DirectoryActor.remote("scale", "measured")  # type: ignore[attr-defined]

        def ask(method: str, *arguments: Any, **named: Any) -> Any:
            return ray.get(actor.call.remote(method, arguments, named))

        node = ray.get_runtime_context().get_node_id()
        for slot in range(100):
            record = DaemonRecord(
                "",
                slot,
                node,
                "host",
                "tcp:10.0.0.1:50051",
                version="0.1.0",
                store_id="s" * 32,
                memory_limit_bytes=1 << 38,
            )
            ask("register", record)
        told = {"memory_used_bytes": 1 << 30, "sequence_count": 3}
        serial = {
            "report": per_second(lambda i: ask("report", f"daemon-{i % 100}", **told)),
            "choose and note": per_second(lambda i: ask("choose", 1, f"sequences/{i}", f"{i}")),
            "find": per_second(lambda i: ask("find", f"sequences/{i % 100}")),
            "moved": per_second(lambda i: ask("moved", f"sequences/{i % 100}", "daemon-0", False)),
            "daemons": per_second(lambda i: ask("daemons")),
        }
        callers = [Caller.remote() for _ in range(3)]  # type: ignore[attr-defined]
        at_once = {
            method: round(
                sum(ray.get([each.rate.remote(actor, method, arguments, 3.0) for each in callers])),
                1,
            )
            for method, arguments in (("find", ("sequences/1",)), ("daemons", ()))
        }
        # Many calls in flight, as from many nodes at the same time.
        begin, count = time.perf_counter(), 3000
        ray.get([actor.call.remote("report", (f"daemon-{i % 100}",), told) for i in range(count)])
        piped = count / (time.perf_counter() - begin)
        (one, *_) = ask("daemons")
        return {
            "what": "calls a second, with 100 daemons",
            "one_caller": serial,
            "three_callers": at_once,
            "reports_on_their_way": round(piped, 1),
            "daemon_record_bytes": len(pickle.dumps((one.name, one))),
            "sequence_record_bytes": len(
                pickle.dumps(("sequences/" + "s" * 32, ("c" * 16, ("daemon-99",))))
            ),
        }
    finally:
        ray.shutdown()
