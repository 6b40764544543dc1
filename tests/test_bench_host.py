"""The suites of host time and of a first call, without a GPU: what is measured how often, recorded and allowed."""

import contextlib
import json
import os
import re
from types import SimpleNamespace

import pytest
import torch

from bench import host, report, startup
from bench.machine import open_machine
from fa3.reference import attention


def read_records(folder, suite):
    return [json.loads(line) for line in (folder / "cpu" / f"{suite}.jsonl").read_text().splitlines()]


def test_startup_takes_a_new_cache_for_each_cold_start(monkeypatch, tmp_path, capsys):
    calls = []
    monkeypatch.setattr(startup, "open_machine", lambda device, commit: open_machine("cpu", "abc"))
    monkeypatch.setattr(startup, "first_call", lambda mode, cache: calls.append((mode, cache)) or 0.25)
    assert startup.main(["--repeats", "2", "--out", str(tmp_path)]) == 0
    modes, caches = zip(*calls, strict=True)
    assert modes == ("free", "free", "free", "forbidden", "forbidden")
    assert len(set(caches)) == 3 and caches[2] == caches[3] == caches[4]
    rows = read_records(tmp_path, "startup")
    assert [(r["cpu_us"], r["config"]["cache"]) for r in rows] == [
        (250000.0, c) for c in ("cold", "cold", "filled", "filled")
    ]
    assert "[red]" not in capsys.readouterr().out


def test_a_first_call_may_keep_bytecode(monkeypatch):
    """A session that forbids it would measure how fast Python compiles."""
    seen = []

    def run(command, env, **options):
        seen.append((command[-1], env))
        return SimpleNamespace(returncode=0, stdout='{"seconds": 0.125}', stderr="")

    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.setattr(startup.subprocess, "run", run)
    assert startup.first_call("forbidden", "/cache") == 0.125
    ((mode, environment),) = seen
    assert mode == "forbidden" and environment["FA3_CACHE_DIR"] == "/cache"
    assert "PYTHONDONTWRITEBYTECODE" not in environment and "PYTHONDONTWRITEBYTECODE" in os.environ


@pytest.mark.parametrize("beyond, status", [(512, 0), (10**6, 1)])
def test_host_fails_where_a_call_takes_more_than_its_outputs(monkeypatch, tmp_path, capsys, beyond, status):
    monkeypatch.setattr(host, "open_machine", lambda device, commit: open_machine("cpu", "abc"))
    monkeypatch.setattr(host, "host_sample", lambda calls, n: 14.0 if torch.is_grad_enabled() else 11.0)
    monkeypatch.setattr(host, "extra_bytes", lambda attention, shape, machine: host.output_bytes(shape) + beyond)
    assert host.main(["--rounds", "2", "--out", str(tmp_path)]) == status
    rows = read_records(tmp_path, "host")
    ours = [r for r in rows if r["impl"] == "ours"]
    assert [r["cpu_us"] for r in ours] == [11.0, 14.0, None, None, None, None]
    assert [r["config"]["gradients"] for r in ours[:2]] == ["off", "on"]
    printed = capsys.readouterr().out
    assert re.search(r"ours +│? *off +│? *11.0", printed) and re.search(r"ours +│? *on +│? *14.0", printed)
    assert [r["config"]["extra_bytes"] - r["config"]["o_lse_bytes"] for r in rows if r["cpu_us"] is None] == [
        beyond
    ] * 4


def test_output_bytes_are_o_and_lse():
    assert host.output_bytes(host.memory_shape(1024)) == 1024 * 16 * 128 * 2 + 1024 * 16 * 4


def test_host_checks_outputs_first_and_enters_a_backend_once_a_sample(monkeypatch):
    entered, samples = [], []

    @contextlib.contextmanager
    def backend():
        entered.append(1)
        yield
        entered.append(-1)

    def peer(q, k, v, causal):
        assert sum(entered) == 1
        return attention(q, k, v, causal=causal)[0]

    def sample(calls, n):
        samples.append((n, calls[0]() is not None, torch.is_grad_enabled()))
        return float(n)

    peer.around = backend
    monkeypatch.setattr(host, "host_sample", sample)
    attentions = {"cudnn": peer, "fa2": lambda q, k, v, causal: q * 0, "fa4": lambda *_: 1 / 0}
    times, problems = host.host_times(attentions, open_machine("cpu", "abc"), 2, report.console())
    assert times == {("cudnn", "off"): [300.0, 300.0], ("cudnn", "on"): [300.0, 300.0]}
    assert sorted(samples) == sorted([(n, True, on) for n in (10, 300) for on in (False, True)] * 2)
    assert len(entered) / 2 == 5  # the check and four samples
    assert problems["fa2"].startswith("wrong: ") and problems["fa4"] == "ZeroDivisionError: division by zero"
