"""``doctor --write-costs``: refusals, the names of devices, and a measured table, here of the CPU."""

import pytest
from click.testing import CliRunner

from pipeproof.cli.main import main
from pipeproof.cost.device_tables import device_table
from pipeproof.cost.plan_times import resolved_cost
from pipeproof.exec.measure.device_costs import UnknownDeviceError, device_named, measure_costs
from pipeproof.specs.load_plan import plan_from_dict
from tests.plans import plan_dict


def test_a_gpu_is_asked_for(tmp_path):
    file = tmp_path / "costs.json"
    for more in ([], ["--backend", "torch"], ["--on", "gpu"]):
        result = CliRunner().invoke(main, ["doctor", "--write-costs", str(file), *more])
        assert result.exit_code == 2
        assert "add --backend torch --on gpu" in result.output
    assert not file.exists()


@pytest.mark.needs_torch
def test_a_machine_without_a_gpu_is_refused_kindly(tmp_path):
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    options = ["--backend", "torch", "--on", "gpu", "--write-costs", str(tmp_path / "costs.json")]
    result = CliRunner().invoke(main, ["doctor", *options])
    assert result.exit_code == 2
    assert "PyTorch sees no GPU: use a machine with one" in result.output


@pytest.mark.parametrize(
    ("name", "device"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA H200", "h200"), ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA GB200", "gb200"), ("AMD Instinct MI300X", "mi300x"),
    ],
)  # fmt: skip
def test_names_of_drivers_are_names_of_data_sheets(name, device):
    assert device_named(name) == device


def test_a_device_without_a_data_sheet_is_refused_with_the_known_ones():
    with pytest.raises(UnknownDeviceError, match=r"no data sheet of NVIDIA GeForce RTX 4090.*h100, h200"):
        device_named("NVIDIA GeForce RTX 4090")


@pytest.mark.needs_torch
def test_a_measured_table_gives_a_plan_its_times():
    torch = pytest.importorskip("torch")
    products = ((64, 64, 64), (128, 128, 128), (128, 64, 256), (256, 256, 256))
    table = measure_costs(torch.device("cpu"), "h100", products=products, keys=(64, 128), rows=64, seconds=0)
    known = device_table("h100")
    assert known is not None
    assert [curve.dtype for curve in table.products] == ["bfloat16", "float8", "float8_block"]
    assert table.products[1:] == known.products[1:]
    assert table.collectives == known.collectives
    assert table.source.startswith("measured with PyTorch")
    for share in (table.products[0].efficiency, table.attention.forward, table.memory_efficiency):
        assert 0 < share < 0.5  # of a GPU's
    assert table.host_us > 0
    assert table.elementwise_us > 0
    analytic = {"device": "h100", "dtype": "bfloat16", "table": table.model_dump(mode="json")}
    ours = resolved_cost(plan_from_dict(plan_dict(cost={"analytic": analytic})).spec)
    theirs = resolved_cost(plan_from_dict(plan_dict(cost={"analytic": analytic | {"table": None}})).spec)
    assert ours.forward_of(0) != theirs.forward_of(0)
