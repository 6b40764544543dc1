"""What a call would run, as a record that prints: the answer of `fa3.explain`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from fa3.device import ASSUMED, Chip, chip
from fa3.heuristics import config_of, num_ctas
from fa3.kernels.compile import state
from fa3.kernels.forward.config import Config, Spec
from fa3.problem import FP8, Problem, check_chip, check_scale, check_sizes, problem_of
from fa3.tma import why_copied

REFERENCE = "reference (CPU)"


@dataclass(frozen=True)
class Explanation:
    runs: str  # "kernel", "reference (CPU)", or "nothing" for an empty problem
    device: str
    problem: Problem
    spec: Spec  # the kernel; for the reference, the one whose order it follows
    config: Config
    tile: tuple[int, int]  # queries, keys
    schedule: str
    num_tiles: int  # work tiles: tile_m queries of one head
    num_ctas: int  # the grid
    threads: int  # in a CTA
    shared_bytes: int
    registers: tuple[int, int]  # a thread of the producer, of a consumer
    cache: str  # "memory", "disk" or "absent"
    copies: tuple[str, ...]  # inputs that TMA cannot take, and why; V of FP8, which is packed

    def __str__(self) -> str:
        p, s, c = self.problem, self.spec, self.config
        lines = {
            "runs": f"{self.runs} on {self.device}",
            "problem": f"batch {p.batch}, seqlen {p.seqlen_q} x {p.seqlen_k}, heads {p.heads} / {p.heads_kv}, "
            f"head dims {p.head_dim}, {p.head_dim_v}",
            "kernel": f"forward, {s.dtype}, head dims {s.head_dim}, {s.head_dim_v}, {'causal' if s.causal else 'full'}"
            + (f", {p.accumulation}, O in {s.dtype_o}" if s.is_fp8 else ""),
            "tile": f"{self.tile[0]} queries x {self.tile[1]} keys, {c.stages} stages",
            "schedule": self.schedule,
            "grid": f"{self.num_ctas} CTAs of {self.threads} threads for {self.num_tiles} work tiles",
            "resources": f"{self.shared_bytes} bytes of shared memory, registers {self.registers[0]} (producer) and "
            f"{self.registers[1]} (consumers)",
            "cache": self.cache,
            "copies": "; ".join(self.copies) or "none",
        }
        return "\n".join(f"{name + ':':<11}{text}" for name, text in lines.items())


def explanation_of(
    q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, causal: bool, accumulation: str
) -> Explanation:
    check_scale(softmax_scale)
    problem = problem_of(q, k, v, softmax_scale, causal, accumulation)
    found, device = _chip_of(q)
    check_chip(found)
    config = config_of(problem, found.num_sms)
    check_sizes(problem, config)
    on_cpu = q.device.type == "cpu"
    runs = REFERENCE if on_cpu else "nothing" if problem.is_empty else "kernel"
    return Explanation(
        runs=runs,
        device=device,
        problem=problem,
        spec=problem.spec,
        config=config,
        tile=(config.tile_m, config.tile_n),
        schedule=_schedule(config),
        num_tiles=problem.num_tiles(config.tile_m),
        num_ctas=num_ctas(config, problem.seqlen_q, problem.batch * problem.heads, found.num_sms),
        threads=config.threads,
        shared_bytes=config.shared_bytes(problem.spec),
        registers=config.registers(problem.spec),
        cache=state(problem.spec, config),
        copies=() if runs != "kernel" else _copies(q=q, k=k, v=v),
    )


def _chip_of(q: Tensor) -> tuple[Chip, str]:
    """The chip that is answered for, and its name. A tensor without memory may stand for one on the current GPU."""
    if q.device.type == "cuda" and not isinstance(q, FakeTensor):
        return chip(q.get_device()), f"{q.device}, {chip(q.get_device()).name}"
    if q.device.type == "cpu":
        return ASSUMED, "cpu"
    found = chip(torch.cuda.current_device()) if torch.cuda.is_available() else ASSUMED
    if not found.is_hopper:
        found = ASSUMED
    return found, f"{q.device}, taken for {found.name}"


def _schedule(config: Config) -> str:
    order = "overlap of softmax and GEMMs" if config.overlap else "no overlap"
    order += ", optimistic softmax" * config.optimistic
    turns = "ping-pong" if config.pingpong else "no ping-pong"
    ctas = "dynamic" if config.dynamic else "persistent" if config.persistent else "one CTA a tile"
    places = ", two places for Q" * (config.q_stages > 1)
    return f"1 producer and {config.warpgroups} consumer warpgroups, {order}, {turns}, {ctas}{places}"


def _copies(**tensors: Tensor) -> tuple[str, ...]:
    reasons = []
    for name, tensor in tensors.items():
        has_memory = tensor.device.type != "meta" and not isinstance(tensor, FakeTensor)
        reason = why_copied(tensor, tensor.data_ptr() if has_memory else None)
        if name == "v" and tensor.dtype == FP8:
            reason = "FP8 is packed head_dim-major first"
        if reason:
            reasons.append(f"{name}: {reason}")
    return tuple(reasons)
