"""Pages in a real Chromium. Without it these tests are skipped; ``make test-browser`` installs it and runs them."""

import pytest

from pipeproof.comm.lower import lower
from pipeproof.sim.simulate import simulate
from pipeproof.specs.load_plan import plan_from_dict
from pipeproof.views.html.timeline_page import timeline_html
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
            "model": {"kind": "gpt", "num_layers": p * v, "hidden_size": 16, "num_heads": 4, "ffn_size": 16,
                      "vocab_size": 16, "seq_length": 8},
            "topology": {"pp": p, "tp": tp},
            "schedule": {"kind": kind, "num_micro_batches": m, "micro_batch_size": 1, "num_chunks": v},
            "cost": {"forward_us": 10, "backward_us": 20, "p2p_latency_us": 2},
        }
    ).spec  # fmt: skip


@pytest.fixture(scope="session")
def page(tmp_path_factory):
    """``page(kind, ranks, micro-batches, chunks)``: the file with the timeline of a plan; with ``mfu`` its memory."""

    def make(*plan, mfu=None):
        lowered = lower(plan_of(*plan))
        simulation = simulate(lowered)
        held = memory_held(simulation.timeline, simulation.memory) if mfu else None
        path = tmp_path_factory.mktemp("page") / "timeline.html"
        title = " ".join(map(str, plan))
        path.write_text(timeline_html(title, simulation.timeline, lowered.graph, held, mfu), encoding="utf-8")
        return path

    return make


@pytest.fixture(scope="session")
def small(page):
    return page("1f1b", 4, 8)


@pytest.fixture
def opened(browser, small):
    """The page of 1F1B on four ranks, anew; whatever the browser complains about in the test fails it."""
    browser.prefer("light")
    browser.open(small)
    browser.settle()
    yield browser
    assert browser.complaints() == []
