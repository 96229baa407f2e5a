"""Products with a packed weight: right numbers, and a row's bits whatever the rows beside it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hasten.errors import CapabilityError
from hasten.native import library as native
from hasten.native.build import compiled
from hasten.native.library import why_not_native
from hasten.targets.fused_native import NativeLinear
from hasten.targets.quantized import Quantized, quantize

if (missing := why_not_native(torch.float32, torch.device("cpu"), 16)) is not None:
    pytest.skip(f"no CPU kernels here: {missing}", allow_module_level=True)


SIZES = [(1, 1), (16, 32), (37, 45), (70, 96), (130, 200)]
KINDS = ("float32", "bfloat16", "int8", "int4")
ROWS = (*range(1, 21), 25, 33, 130)


@pytest.fixture(scope="module")
def portable() -> native.Library:
    """The kernels without instructions of one kind of processor."""
    return native.Library(compiled(portable=True))


@pytest.fixture(params=["fast", "portable"])
def build(
    request: pytest.FixtureRequest, portable: native.Library, monkeypatch: pytest.MonkeyPatch
) -> str:
    """Which build of the kernels runs."""
    if request.param == "portable":
        monkeypatch.setattr(native, "_load", lambda: portable)
    return str(request.param)


def random(*size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


def made(kind: str, out: int, size: int, bias: torch.Tensor | None = None) -> NativeLinear:
    weight = random(out, size, seed=out + size)
    if kind == "bfloat16":
        return NativeLinear(weight.bfloat16(), bias)
    if kind == "float32":
        return NativeLinear(weight, bias)
    return NativeLinear(quantize(weight, int(kind.removeprefix("int"))), bias)


def as_read(kind: str, x: torch.Tensor) -> torch.Tensor:
    """Inputs as the product of this kind reads them."""
    if kind == "float32":
        return x
    if kind == "bfloat16":
        return x.bfloat16().float()
    groups = -(-x.shape[1] // native.GROUP)
    padded = torch.nn.functional.pad(x, (0, groups * native.GROUP - x.shape[1]))
    parts = padded.view(len(x), groups, native.GROUP).numpy().astype(np.float32)
    top = np.abs(parts).max(2, keepdims=True)
    inverse = np.divide(127, top, out=np.zeros_like(top), where=top > 0, dtype=np.float32)
    rounded = np.rint(parts * inverse) * (top / np.float32(127))
    return torch.from_numpy(rounded.reshape(len(x), -1)[:, : x.shape[1]])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", SIZES)
def test_a_product_is_that_of_the_dense_weight(
    kind: str, size: tuple[int, int], build: str
) -> None:
    bias = random(size[0], seed=9)
    linear, x = made(kind, *size, bias), random(11, size[1], seed=5)
    want = as_read(kind, x).double() @ linear.dense().double().T + bias.double()
    torch.testing.assert_close(linear(x).double(), want, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_gets_the_same_bits_whatever_rows_are_beside_it(kind: str, build: str) -> None:
    linear, x = made(kind, 70, 96), random(max(ROWS), 96, seed=7)
    alone = torch.cat([linear(row) for row in x.split(1)])
    for rows in ROWS:
        assert torch.equal(linear(x[:rows]), alone[:rows]), rows


@pytest.mark.parametrize("kind", KINDS)
def test_threads_change_no_bit(kind: str) -> None:
    linear, x = made(kind, 130, 64), random(9, 64)
    before = torch.get_num_threads()
    try:
        found = []
        for threads in (1, 2, 3, 5):
            torch.set_num_threads(threads)
            found.append(linear(x))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(found[0], other) for other in found)


@pytest.mark.parametrize("kind", KINDS)
def test_both_builds_read_the_same_weight(kind: str, portable: native.Library) -> None:
    linear, x = made(kind, 70, 96), random(5, 96)
    fast = linear(x)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "_load", lambda: portable)
        assert torch.equal(linear.dense(), made(kind, 70, 96).dense())
        torch.testing.assert_close(linear(x), fast, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dense_gives_the_weight_back_and_rows_some_of_it(dtype: torch.dtype) -> None:
    weight = random(37, 45).to(dtype)
    linear = NativeLinear(weight)
    assert torch.equal(linear.dense(), weight)
    assert torch.equal(linear.rows(torch.tensor([36, 0, 17])), weight[[36, 0, 17]].float())


def test_dense_gives_quantized_numbers_back() -> None:
    for bits in (8, 4):
        weight = quantize(random(37, 45), bits)
        assert torch.equal(NativeLinear(weight).dense(), weight.dense())


@pytest.mark.parametrize("kind", KINDS)
def test_pieces_make_the_same_weight_as_the_whole(kind: str) -> None:
    weight = random(100, 45)
    parts = [weight[:32], weight[32:96], weight[96:]]
    if kind == "bfloat16":
        weight, parts = weight.bfloat16(), [part.bfloat16() for part in parts]
    whole, pieces = NativeLinear(weight), NativeLinear.from_pieces(parts, 100, 45)
    if kind.startswith("int"):
        bits = int(kind.removeprefix("int"))
        whole = NativeLinear(quantize(weight, bits))
        pieces = NativeLinear.from_pieces((quantize(part, bits) for part in parts), 100, 45)
    assert torch.equal(whole.dense(), pieces.dense())


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_not_a_number_stays_in_its_row(kind: str, value: float, build: str) -> None:
    linear, x = made(kind, 40, 64), random(3, 64)
    clean = linear(x)
    x[1, 5] = value
    got = linear(x)
    assert not got[1].isfinite().any()
    assert torch.equal(got[[0, 2]], clean[[0, 2]])


@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize(
    "value",
    [
        torch.nan,
        torch.inf,
    ],
)
def test_a_quantized_product_does_not_hide_what_is_not_a_number(kind: str, value: float) -> None:
    linear, x = made(kind, 40, 64), random(3, 64)
    clean = linear(x)
    x[1, 5] = value
    got = linear(x)
    assert torch.equal(got[[0, 2]], clean[[0, 2]])
    assert not got[1].isfinite().any()


def whole(low: int, high: int, *size: int) -> torch.Tensor:
    return torch.randint(low, high + 1, size, generator=torch.Generator().manual_seed(3)).float()


@pytest.mark.parametrize("kind", KINDS)
def test_whole_numbers_are_added_up_exactly(kind: str, build: str) -> None:
    x = whole(-7, 7, 13, 96)
    x[:, ::32] = 127  # the scale of each group of inputs is 1
    if kind.startswith("int"):
        bits = int(kind.removeprefix("int"))
        q, ones = whole(0, 2**bits - 1, 70, 96).to(torch.uint8), torch.ones(70, 3).half()
        quantized = Quantized(native.Q8 if bits == 8 else native.Q4, q, ones, -9 * ones, 96)
        weight, linear = q.float() - 9, NativeLinear(quantized)
    else:
        weight = whole(-100, 100, 70, 96)
        linear = NativeLinear(weight.to(getattr(torch, kind)))
    assert torch.equal(linear.dense().float(), weight)
    assert torch.equal(linear(x), x @ weight.T)


@pytest.mark.parametrize("kind", KINDS)
def test_no_rows_give_no_rows(kind: str) -> None:
    linear = made(kind, 40, 64)
    assert linear(torch.empty(0, 64)).shape == (0, 40)
    assert linear.rows(torch.empty(0, dtype=torch.int64)).shape == (0, 64)


def test_weights_of_another_dtype_are_refused() -> None:
    with pytest.raises(CapabilityError, match="float16"):
        NativeLinear(random(4, 4).half())
