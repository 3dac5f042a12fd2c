"""linear_logprob in one process: values worked out by hand, options, and what it refuses."""

import itertools
import math

import pytest
import torch
from grpo_kernels import linear_logprob
from grpo_kernels.chunked import ChunkedBackend, product_dtype
from hypothesis import given, settings
from hypothesis import strategies as st
from logprob_oracle import IGNORED, TOLERANCE, Case, disagreements, make_problem, naive_logprob
from torch import Tensor


def random_head(
    num_tokens: int, width: int, vocab: int, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor]:
    rng = torch.Generator().manual_seed(7)
    hidden_TD = torch.randn(num_tokens, width, generator=rng).to(dtype)
    weight_VD = torch.randn(vocab, width, generator=rng).to(dtype)
    targets_T = torch.randint(0, vocab, (num_tokens,), generator=rng)
    return hidden_TD, weight_VD, targets_T


@pytest.mark.parametrize(
    ("temperature", "expected"),
    [
        (1.0, [-0.4076, -1.4076, -2.4076]),
        (0.5, [-0.1429, -2.1429, -4.1429]),
        (2.0, [-0.6803, -1.1803, -1.6803]),
    ],
)
def test_temperature_divides_the_logits_whether_a_number_or_per_token(
    temperature: float, expected: list[float]
) -> None:
    """Fault A1: logits [2, 1, 0], every id as the target."""
    hidden_TD = torch.tensor([[2.0, 1.0, 0.0]]).expand(3, 3)
    for value in (temperature, torch.full((3,), temperature)):
        logprob_T, _ = linear_logprob(hidden_TD, torch.eye(3), torch.arange(3), temperature=value)
        torch.testing.assert_close(logprob_T, torch.tensor(expected), atol=5e-5, rtol=0)


def test_entropy_is_that_of_the_scaled_distribution() -> None:
    """Logits [ln 4, 0]: p = [.8, .2] at temperature 1, and [2/3, 1/3] at temperature 2."""
    hidden_TD = torch.tensor([[math.log(4.0), 0.0]]).expand(2, 2)
    temperature_T = torch.tensor([1.0, 2.0])
    _, entropy_T = linear_logprob(
        hidden_TD, torch.eye(2), torch.tensor([0, 0]), temperature=temperature_T
    )
    by_hand = [
        -(0.8 * math.log(0.8) + 0.2 * math.log(0.2)),
        math.log(3.0) - 2.0 / 3.0 * math.log(2.0),
    ]
    torch.testing.assert_close(entropy_T, torch.tensor(by_hand), atol=1e-6, rtol=0)


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("temperature", [0.7, "per token"])
def test_gradcheck_in_fp64_through_both_outputs(with_bias: bool, temperature: float | str) -> None:
    hidden_TD, weight_VD, targets_T = random_head(4, 3, 5, torch.float64)
    targets_T[1] = IGNORED
    scale = torch.tensor([0.5, 1.0, 1.7, 3.0]) if isinstance(temperature, str) else temperature
    inputs = [hidden_TD.requires_grad_(), weight_VD.requires_grad_()]
    if with_bias:
        inputs.append(torch.linspace(-1, 1, 6, dtype=torch.float64)[:5].requires_grad_())

    def op(hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return linear_logprob(
            hidden,
            weight,
            targets_T,
            temperature=scale,
            bias=bias,
            vocab_size=4 if int(targets_T.max()) < 4 else 5,
            chunk_tokens=3,
            chunk_vocab=2,
        )

    assert torch.autograd.gradcheck(op, tuple(inputs))


@pytest.mark.parametrize("ignored", ["first", "last", "all"])
@pytest.mark.parametrize("product", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("chunk", [5, None])
def test_bf16_agrees_whether_operands_are_multiplied_narrow_or_widened(
    ignored: str, product: torch.dtype, chunk: int | None
) -> None:
    """The narrow products are what a CPU with bf16 units takes, whatever this machine has."""
    for temperature, entropy in itertools.product([0.5, "per token"], [True, False]):
        case = Case("bf16", temperature, entropy, ignored, False, chunk, bias=True)
        problem = make_problem(case)
        hidden_TD = problem.base_TD.clone().requires_grad_()
        weight_VD = problem.weight_VD.clone().requires_grad_()
        assert problem.bias_V is not None
        bias_V = problem.bias_V.clone().requires_grad_()
        logprob_T, entropy_T = linear_logprob(
            hidden_TD,
            weight_VD,
            problem.targets_T,
            temperature=problem.temperature,
            bias=bias_V,
            implementation=ChunkedBackend(chunk, chunk, product=product),
        )
        problem.loss(case, logprob_T, entropy_T).backward()
        assert hidden_TD.grad is not None and weight_VD.grad is not None
        assert bias_V.grad is not None
        found = {
            "logprob": logprob_T.detach(),
            "entropy": entropy_T.detach(),
            "hidden gradient": hidden_TD.grad,
            "weight gradient": weight_VD.grad,
            "bias gradient": bias_V.grad,
        }
        assert logprob_T.dtype == entropy_T.dtype == torch.float32
        assert not disagreements(case, found, problem.answers)


@settings(max_examples=40, deadline=None)
@given(
    num_tokens=st.integers(0, 9),
    width=st.integers(1, 6),
    vocab=st.integers(1, 11),
    chunk_tokens=st.integers(1, 10),
    chunk_vocab=st.integers(1, 12),
)
def test_any_sizes_agree_with_naive_logits(
    num_tokens: int, width: int, vocab: int, chunk_tokens: int, chunk_vocab: int
) -> None:
    """No size is special: no tokens, one token, a vocabulary of one id, chunks past the end."""
    hidden_TD, weight_VD, targets_T = random_head(num_tokens, width, vocab)
    results = []
    for fused in (True, False):
        dtype = torch.float32 if fused else torch.float64
        hidden = hidden_TD.to(dtype, copy=True).requires_grad_()
        weight = weight_VD.to(dtype, copy=True).requires_grad_()
        if fused:
            logprob_T, entropy_T = linear_logprob(
                hidden,
                weight,
                targets_T,
                chunk_tokens=chunk_tokens,
                chunk_vocab=chunk_vocab,
            )
        else:
            logprob_T, entropy_T = naive_logprob(hidden, weight, targets_T)
        (logprob_T.sum() - 0.3 * entropy_T.sum()).backward()
        assert hidden.grad is not None and weight.grad is not None
        results.append([logprob_T.detach(), entropy_T.detach(), hidden.grad, weight.grad])
    for fused, naive in zip(*results, strict=True):
        torch.testing.assert_close(fused.double(), naive.double(), atol=2e-5, rtol=1e-5)


def test_padding_rows_never_enter_the_softmax_and_stay_put_under_adam() -> None:
    """Fault B6: 130 ids in 256 rows whose padding would win every softmax."""
    hidden_TD, weight_VD, _ = random_head(6, 8, 256)
    weight_VD[130:] = 10.0
    weight = torch.nn.Parameter(weight_VD.clone())
    all_ids = torch.arange(130)
    logprob_V, _ = linear_logprob(
        hidden_TD[:1].expand(130, -1).contiguous(), weight, all_ids, vocab_size=130
    )
    assert logprob_V.exp().sum().item() == pytest.approx(1.0, abs=1e-5)
    expected_V, _ = naive_logprob(
        hidden_TD[:1].expand(130, -1).double(), weight_VD[:130].double(), all_ids
    )
    torch.testing.assert_close(logprob_V.double(), expected_V, atol=1e-5, rtol=1e-5)
    (-logprob_V.mean()).backward()
    assert weight.grad is not None
    assert torch.count_nonzero(weight.grad[130:]) == 0
    torch.optim.Adam([weight], lr=0.1).step()
    assert torch.equal(weight.detach()[130:], weight_VD[130:])


def test_an_ignored_token_has_logprob_zero_and_no_gradient_whatever_is_fed_back() -> None:
    """Fault D6: the op's own mask is the target, and it is the same forward and backward."""
    hidden_TD, weight_VD, targets_T = random_head(4, 3, 5)
    targets_T[2] = IGNORED
    hidden = hidden_TD.requires_grad_()
    logprob_T, entropy_T = linear_logprob(hidden, weight_VD, targets_T)
    logprob_T.backward(torch.tensor([1.0, -2.0, 1e6, 0.0]))
    assert logprob_T[2].item() == 0.0
    assert hidden.grad is not None
    assert torch.count_nonzero(hidden.grad[2]) == 0
    assert torch.count_nonzero(hidden.grad[3]) == 0
    assert torch.count_nonzero(hidden.grad[1]) == 3
    # Its entropy is that of its distribution, and two 4-token responses' means are theirs alone.
    _, expected_T = naive_logprob(hidden_TD, weight_VD, targets_T)
    torch.testing.assert_close(entropy_T, expected_T, atol=1e-5, rtol=1e-5)


def test_asking_for_the_entropy_changes_nothing_else() -> None:
    """Fault D7: the entropy's passes must not touch what the log-probability needs."""
    gradients = []
    for with_entropy in (True, False):
        hidden_TD, weight_VD, targets_T = random_head(7, 5, 9)
        before = hidden_TD.clone(), weight_VD.clone()
        hidden, weight = hidden_TD.requires_grad_(), weight_VD.requires_grad_()
        logprob_T, entropy_T = linear_logprob(
            hidden, weight, targets_T, with_entropy=with_entropy, chunk_vocab=4
        )
        assert (entropy_T is None) != with_entropy
        (logprob_T * torch.linspace(-1, 1, 7)).sum().backward()
        gradients.append((logprob_T.detach(), hidden.grad, weight.grad))
        assert torch.equal(hidden.detach(), before[0])
        assert torch.equal(weight.detach(), before[1])
    for with_it, without in zip(*gradients, strict=True):
        assert with_it is not None and without is not None
        assert torch.equal(with_it, without)


def test_the_gradient_of_a_nearly_certain_target_keeps_its_bits_in_bf16() -> None:
    """Fault D7: p = 1 - 1.2e-4, so 1 - p has no bit left where p was rounded to bf16."""
    hidden_TD = torch.tensor([[9.0]], dtype=torch.bfloat16)
    for product in (torch.bfloat16, torch.float32):
        weight = torch.tensor([[1.0], [0.0]], dtype=torch.bfloat16).requires_grad_()
        logprob_T, _ = linear_logprob(
            hidden_TD,
            weight,
            torch.tensor([0]),
            implementation=ChunkedBackend(product=product),
        )
        logprob_T.sum().backward()
        assert weight.grad is not None
        expected = 9.0 / (1.0 + math.exp(9.0))
        assert weight.grad[0].item() == pytest.approx(expected, rel=2**-7)
        assert weight.grad[1].item() == pytest.approx(-expected, rel=2**-7)


def test_a_large_common_offset_costs_the_entropy_nothing() -> None:
    hidden_TD, weight_VD, targets_T = random_head(5, 4, 6)
    _, plain_T = linear_logprob(hidden_TD, weight_VD, targets_T)
    offset_V = torch.full((6,), 1024.0)
    rounded = ((hidden_TD @ weight_VD.t() + 1024.0) - 1024.0).double()
    _, expected_T = naive_logprob(rounded, torch.eye(6, dtype=torch.float64), targets_T)
    _, entropy_T = linear_logprob(hidden_TD, weight_VD, targets_T, bias=offset_V, chunk_vocab=2)
    torch.testing.assert_close(entropy_T.double(), expected_T, atol=3e-4, rtol=0)
    torch.testing.assert_close(entropy_T, plain_T, atol=1e-3, rtol=0)


def test_logits_of_hundreds_do_not_overflow() -> None:
    hidden_TD = torch.tensor([[500.0, -500.0, 499.0]])
    logprob_T, entropy_T = linear_logprob(hidden_TD, torch.eye(3), torch.tensor([2]), chunk_vocab=1)
    log_sum = math.log(1.0 + math.exp(-1.0))
    assert logprob_T.item() == pytest.approx(-1.0 - log_sum, abs=1e-5)
    p = 1.0 / (1.0 + math.exp(-1.0))
    assert entropy_T.item() == pytest.approx(log_sum + (1 - p), abs=1e-5)


def test_a_frozen_head_gets_no_weight_gradient_and_the_hidden_gradient_is_unchanged() -> None:
    hidden_TD, weight_VD, targets_T = random_head(6, 4, 7)
    grads = []
    for frozen in (False, True):
        hidden = hidden_TD.clone().requires_grad_()
        weight = weight_VD.clone().requires_grad_(not frozen)
        logprob_T, _ = linear_logprob(hidden, weight, targets_T)
        logprob_T.sum().backward()
        assert (weight.grad is None) == frozen
        grads.append(hidden.grad)
    assert torch.equal(grads[0], grads[1])


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_main_grad_is_added_to_in_fp32_and_the_parameter_gets_nothing(dtype: str) -> None:
    """In bf16 the sum is finer than bf16 could hold, as the second of two backward passes shows;
    where the processor multiplies bf16, the tiles that are multiplied are bf16 too.
    """
    case = Case(dtype, 1.0, True, "first", tied=False, chunk=5)
    problem = make_problem(case)
    start_VD = torch.full(problem.weight_VD.shape, 1.0)
    main_grad = start_VD.clone()
    weight = problem.weight_VD.clone().requires_grad_()
    sums = []
    for _ in range(2):
        logprob_T, entropy_T = linear_logprob(
            problem.base_TD,
            weight,
            problem.targets_T,
            main_grad=main_grad,
            chunk_tokens=5,
            chunk_vocab=4,
        )
        problem.loss(case, logprob_T, entropy_T).backward()
        assert weight.grad is None
        sums.append((main_grad - start_VD).double())
    torch.testing.assert_close(sums[1], 2 * sums[0], atol=2e-6, rtol=0)
    expected = problem.answers["weight gradient"]
    exact = product_dtype(weight) == torch.float32
    error = (sums[1] / 2 - expected).abs().max() / expected.abs().max()
    assert error < (1e-5 if exact else TOLERANCE[dtype])


def test_the_placeholder_gradient_is_zeros() -> None:
    hidden_TD, weight_VD, targets_T = random_head(3, 2, 4)
    weight = weight_VD.requires_grad_()
    main_grad = torch.zeros(4, 2)
    logprob_T, _ = linear_logprob(
        hidden_TD, weight, targets_T, main_grad=main_grad, weight_grad_placeholder=True
    )
    logprob_T.sum().backward()
    assert weight.grad is not None
    assert torch.count_nonzero(weight.grad) == 0
    assert torch.count_nonzero(main_grad) == 8


def test_bf16_weight_gradients_over_many_chunks_are_summed_in_fp32() -> None:
    """4096 equal contributions of 2^-9: a bf16 sum would stall at 0.5, far short of 8."""
    num_tokens = 4096
    hidden_TD = torch.full((num_tokens, 1), 2.0**-8, dtype=torch.bfloat16)
    weight = torch.zeros(2, 1, dtype=torch.bfloat16).requires_grad_()
    for product, tokens in ((torch.float32, 1), (torch.bfloat16, 64)):
        weight.grad = None
        logprob_T, _ = linear_logprob(
            hidden_TD,
            weight,
            torch.zeros(num_tokens, dtype=torch.int64),
            implementation=ChunkedBackend(tokens=tokens, product=product),
        )
        logprob_T.sum().backward()
        assert weight.grad is not None
        assert weight.grad.flatten().tolist() == pytest.approx([8.0, -8.0], rel=2**-8)


@pytest.mark.parametrize("temperature", [0.0, -1.0, 1e-40, math.nan, math.inf])
def test_a_temperature_that_is_not_finite_and_positive_is_refused(temperature: float) -> None:
    hidden_TD, weight_VD, targets_T = random_head(2, 2, 3)
    with pytest.raises(ValueError, match="temperature must be finite and at least 1e-30"):
        linear_logprob(hidden_TD, weight_VD, targets_T, temperature=temperature)
    per_token_T = torch.tensor([1.0, temperature])
    with pytest.raises(ValueError, match="at position 1"):
        linear_logprob(hidden_TD, weight_VD, targets_T, temperature=per_token_T)


@pytest.mark.parametrize(("target", "vocab_size"), [(7, None), (5, 5), (-1, None), (-99, None)])
def test_a_target_outside_the_vocabulary_is_refused_by_value(
    target: int, vocab_size: int | None
) -> None:
    hidden_TD, weight_VD, _ = random_head(2, 2, 7)
    targets_T = torch.tensor([0, target])
    with pytest.raises(ValueError, match=f"target {target} at position 1 is outside"):
        linear_logprob(hidden_TD, weight_VD, targets_T, vocab_size=vocab_size)


def test_inputs_that_do_not_fit_are_refused_with_what_was_found() -> None:
    hidden_TD, weight_VD, targets_T = random_head(3, 2, 4)
    for match, change in [
        ("needs hidden", {"hidden_TD": hidden_TD[:, :1]}),
        ("one floating dtype", {"weight_VD": weight_VD.double()}),
        ("shape \\[3\\]", {"targets_T": targets_T[:2]}),
        ("bias must be \\[4\\]", {"bias": torch.zeros(3)}),
        ("main_grad must have", {"main_grad": torch.zeros(3, 2)}),
        ("in torch.int64", {"main_grad": torch.zeros(4, 2, dtype=torch.int64)}),
        ("on the weight's device cpu; got meta", {"main_grad": torch.zeros(4, 2, device="meta")}),
        ("bias must be on", {"bias": torch.zeros(4, device="meta")}),
        ("vocab_size=5 does not fit", {"vocab_size": 5}),
        ("one per token", {"temperature": torch.ones(2)}),
        ("needs a gradient", {"temperature": torch.ones(3, requires_grad=True)}),
        ("chunked or triton", {"implementation": "cuda"}),
    ]:
        arguments = {"hidden_TD": hidden_TD, "weight_VD": weight_VD, "targets_T": targets_T}
        with pytest.raises(ValueError, match=match):
            linear_logprob(**{**arguments, **change})


def test_a_second_derivative_is_refused() -> None:
    hidden_TD, weight_VD, targets_T = random_head(3, 2, 4)
    hidden = hidden_TD.requires_grad_()
    logprob_T, _ = linear_logprob(hidden, weight_VD, targets_T)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(logprob_T.sum(), hidden, create_graph=True)


@pytest.mark.parametrize("name", ["chunk_tokens", "chunk_vocab"])
def test_a_tile_of_no_size_is_refused(name: str) -> None:
    hidden_TD, weight_VD, targets_T = random_head(3, 2, 4)
    with pytest.raises(ValueError, match=f"{name} must be at least 1; got -1"):
        linear_logprob(hidden_TD, weight_VD, targets_T, **{name: -1})


def test_tolerances_are_those_of_the_fault_list() -> None:
    assert (TOLERANCE["fp32"], TOLERANCE["bf16"]) == (1e-5, 2e-2)
