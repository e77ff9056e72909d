"""Pages in a real Chromium. Without it these tests are skipped; ``make test-browser`` installs it and runs them."""

import pytest

from pipeproof.comm.lower import lower
from pipeproof.sim.simulate import simulate
from pipeproof.specs.load_plan import plan_from_dict
from pipeproof.views.html.timeline_page import write_html
from pipeproof.views.memory_curves import memory_held


@pytest.fixture(scope="session")
def browser():
    from driver import Browser  # tests that need no browser are collected without Selenium

    opened = Browser()
    yield opened
    opened.close()


def plan_of(kind, p, m, v=1, tp=1):
    return plan_from_dict(
        {
            "pipeproof": 1,
            "model": {
                "kind": "gpt",
                "num_layers": p * v,
                "hidden_size": 16,
                "num_heads": 4,
                "ffn_size": 16,
                "vocab_size": 16,
                "seq_length": 8,
            },
            "topology": {"pp": p, "tp": tp},
            "schedule": {"kind": kind, "num_micro_batches": m, "micro_batch_size": 1, "num_chunks": v},
            "cost": {"forward_us": 10, "backward_us": 20, "p2p_latency_us": 2},
        }
    ).spec


@pytest.fixture(scope="session")
def lowered_of():
    """``lowered_of(kind, ranks, micro-batches, chunks)``: a plan, lowered."""
    return lambda *plan: lower(plan_of(*plan))


@pytest.fixture(scope="session")
def page(tmp_path_factory):
    """``page(plans...)``: the file with the timelines of plans, each (kind, ranks, micro-batches, chunks)."""

    def make(*plans):
        timelines = []
        for plan in plans:
            lowered = lower(plan_of(*plan))
            timelines.append((" ".join(map(str, plan)), simulate(lowered).timeline, lowered.graph))
        path = tmp_path_factory.mktemp("page") / "timeline.html"
        write_html(timelines, path)
        return path

    return make


@pytest.fixture(scope="session")
def small(page):
    return page(("1f1b", 4, 8))


@pytest.fixture(scope="session")
def in_bytes(tmp_path_factory):
    """The same page with the memory of each rank in place of the activations that it holds."""
    lowered = lower(plan_of("1f1b", 4, 8))
    simulation = simulate(lowered)
    held = memory_held(simulation.timeline, simulation.memory)
    path = tmp_path_factory.mktemp("page") / "memory.html"
    write_html([("1f1b", simulation.timeline, lowered.graph, held)], path)
    return path


@pytest.fixture
def opened(browser, small):
    """The page of 1F1B on four ranks, anew; whatever the browser complains about in the test fails it."""
    browser.prefer("light")
    browser.open(small)
    browser.settle()
    yield browser
    assert browser.complaints() == []
