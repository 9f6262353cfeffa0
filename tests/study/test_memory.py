"""Memory estimates of `hacrl doctor`, by hand and against the allocations of a step."""

import math
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from small_models import save_model
from team import team
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Gemma2Config,
    GraniteConfig,
    PretrainedConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from hacrl.algorithms import make_algorithm, make_settings
from hacrl.config import AgentConfig, Config, parse_config
from hacrl.pocket import pocket_path
from hacrl.policy import head, offload
from hacrl.policy.policy import Policy
from hacrl.study.doctor import doctor
from hacrl.study.doctor.memory import (
    Need,
    device_peak,
    estimate_need,
    measure,
    side_by_side_peak,
)
from hacrl.types import Sample, Update

CPU = torch.device("cpu")
CUDA = torch.device("cuda")  # for sizes only


SIZES = {
    "vocab_size": 300,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
}


def config(*agents: dict, **changes) -> Config:
    small = {"steps": 1, "prompts_per_step": 4, "samples_per_prompt": 4, "minibatch_samples": 16}
    limits = {
        "max_prompt_tokens": 70,
        "max_response_tokens": 30,
        "runtime": {},
        "evaluation": {"problems": 4},
    }
    named = [{"name": f"a{i}", "learning_rate": 1e-6, **a} for i, a in enumerate(agents)]
    return parse_config(team(*named, **small | limits | changes))


def need_of(folder: Path, device: torch.device = CPU, whole: float | None = None, **agent) -> Need:
    made = config({"model": str(folder), **agent}, {"model": "pocket:finch"})
    return estimate_need(made, made.agents[0], str(folder), device, whole)


def test_weights_optimizer_and_cache_by_hand() -> None:
    """Bytes per parameter: float32 4 and moments 8; bfloat16 2, master 4 and moments 8. The KV cache of
    16 rows has 100 tokens per row on the CPU. On a GPU a row has 2 + 1 pages of 64 tokens and each of 4
    prompts 2 pages, within a fifth of the device. Two replies of 500 tokens to each of 3 held-out
    problems are 6 x 570 tokens, or 6 x (9 + 1) + 3 x 2 pages."""
    folder = pocket_path("wren")
    model = AutoModelForCausalLM.from_pretrained(folder)
    count, shape = sum(p.numel() for p in model.parameters()), model.config
    token = 2 * shape.num_hidden_layers * shape.num_key_value_heads * shape.head_dim
    need = need_of(folder)
    assert (need.parameters, need.weights, need.offloadable) == (count, 4 * count, 8 * count)
    assert need.cache == 16 * 100 * token * 4
    half = need_of(folder, CUDA, 1e15)
    assert (half.weights, half.offloadable) == (2 * count, 12 * count)
    assert half.cache == (16 * 3 + 4 * 2) * 64 * token * 2
    assert need_of(folder, CUDA, 1e6).cache == need_of(folder, CPU, 1e6).cache == pytest.approx(2e5)
    for device, tokens, width in ((CPU, 6 * 570, 4), (CUDA, (6 * 10 + 3 * 2) * 64, 2)):
        evaluation = {"problems": 3, "samples": 2, "max_response_tokens": 500}
        made = config({"model": str(folder)}, {"model": "pocket:finch"}, evaluation=evaluation)
        found = estimate_need(made, made.agents[0], str(folder), device, None)
        assert found is not None and found.cache == tokens * token * width
    adapter = need_of(folder, lora={"rank": 4})
    assert adapter.weights == 4 * count and adapter.offloadable < 8 * 0.2 * count
    frozen = need_of(folder, learn=False)
    assert (frozen.offloadable, frozen.learning) == (0, 0)


BIG = Need(
    parameters=1, weights=10, offloadable=60, learning=50, cache=8, sampling=5, offload="auto"
)
SMALL = replace(BIG, weights=4, offloadable=24, learning=40)


def test_a_devices_peak_by_hand() -> None:
    """Alone: 10 + 60 + the cache of 8 + 50 while it learns. Together: 4 + 24 more, or 4 if
    the other agent is offloaded. `auto` offloads if 10 + 60 + 4 + 24 + 8 = 106 is more than two thirds
    of the device. On a CPU the cache is freed while an agent learns."""
    assert device_peak({"big": BIG}, None, True).bytes == 128
    assert device_peak({"big": BIG}, None, False).bytes == 120
    both = {"big": BIG, "small": SMALL}
    peak = device_peak(both, 160.0, True)
    assert (peak.bytes, peak.when, peak.offloaded) == (156, "big learns", False)
    peak = device_peak(both, 158.0, True)
    assert (peak.bytes, peak.when, peak.offloaded) == (132, "big learns", True)
    never = {name: replace(n, offload="none") for name, n in both.items()}
    assert device_peak(never, 158.0, True).bytes == 156
    offloaded = {name: replace(n, offload="optimizer", learning=0) for name, n in both.items()}
    peak = device_peak(offloaded, None, True)
    assert (peak.bytes, peak.when) == (10 + 4 + 8 + 5, "small samples")
    assert side_by_side_peak(both, None, True).bytes == 128 + (4 + 24 + 8 + 40)
    assert "runtime.kind = 'processes'" in doctor.parallel_hint(both, 215.0)  # 95 % are 204.25
    assert doctor.parallel_hint(both, 214.0) == doctor.parallel_hint({"big": BIG}, 1e3) == ""


@pytest.mark.parametrize(("here", "offloads"), [(67, True), (26, True), (25, False)])
def test_a_run_counts_what_is_offloaded_at_the_moment(
    here: int, offloads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two thirds of 100 bytes, wherever 41 of them are now."""

    class Offloader:
        device = torch.device("cuda:0")

        def absent_bytes(self) -> int:
            return 0 if here == 67 else 41

    kept = Offloader()
    monkeypatch.setattr(offload, "_offloaders", weakref.WeakSet((kept,)))
    monkeypatch.setattr(offload, "memory_in_use", lambda device: (here, 100))
    assert offload.short_of_memory(kept.device) == offloads


class Tracked(TorchDispatchMode):
    """Bytes of all live tensors, and their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._seen: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()

    def add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage not in self._seen:
            size = storage.nbytes()
            self._seen[storage] = True
            self.now += size
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._gone, size)

    def _gone(self, size: int) -> None:
        self.now -= size

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self.add(leaf)
        return out


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": "float32"},
        {"dtype": "bfloat16"},
        {"dtype": "bfloat16", "gradient_checkpointing": True},
        {"dtype": "bfloat16", "lora": {"rank": 4}},
    ],
)
@pytest.mark.parametrize("family", ["llama", "qwen", "granite", "gemma2"])
def test_an_update_allocates_what_was_estimated(
    family: str, changes: dict, llama: Path, qwen: Path, tmp_path: Path, monkeypatch
) -> None:
    """Sixteen sequences of maximum length in micro-batches of four, two updates. A chunk of logits has 8
    tokens here, so that it does not dominate. Granite scales its logits. Gemma 2 caps them, and holds
    those of all tokens: the estimate is of long replies."""
    monkeypatch.setitem(head.CHUNK_BYTES, "cpu", 8 * 258 * 12)
    wide = {**SIZES, "vocab_size": 4000}
    other = {
        "granite": GraniteConfig(**wide, logits_scaling=8.0),
        "gemma2": Gemma2Config(**wide, head_dim=8),
    }
    prompt = 10 if family == "gemma2" else 70
    given = {"llama": llama, "qwen": qwen}
    folder = given.get(family) or save_model(other[family], tmp_path, llama)
    need = need_of(folder, microbatch_tokens=400, **changes)
    agent = AgentConfig(name="a", model=str(folder), microbatch_tokens=400, **changes)
    policy = Policy(agent, device="cpu", temperature=1.0, beta=0.0)
    samples = [
        Sample(
            problem_id="p",
            index=i,
            source="a",
            is_own=True,
            token_ids=tuple((3 * t + i) % 250 for t in range(100)),
            loss_mask=(0,) * prompt + (1,) * (100 - prompt),
            behaviour=-math.log(250),
            advantage=1.0,
        )
        for i in range(16)
    ]
    settings = make_settings("gspo", epsilon_low=0.999, epsilon_high=1e6)
    loss = make_algorithm(settings).loss
    tracked = Tracked()
    for tensor in (*policy.model.parameters(), *policy.master.values()):
        tracked.add(tensor)
    with tracked:
        for _ in range(2):
            policy.update(samples, loss, Update(0, 0.8, "own", ("p",)))
    estimate = need.weights + need.offloadable + need.learning
    assert estimate == pytest.approx(tracked.peak, rel=0.2)


def test_bytes_for_the_backward_by_hand(tmp_path: Path) -> None:
    """Elements per token and layer of a Qwen3 with hidden size 32, heads 4 and 2 of size 8, inner size
    64: inputs and outputs of two norms 4 x 32 (and a half for the last norm, of two layers); queries
    and keys before their norm and behind it 2 x (32 + 16), values 16, attention's output 32; gate, up
    and product 3 x 64. In float32 also the activated gate and a copy in each norm. Two of four experts
    of size 24 have an inner size of 48. An unknown architecture is no error."""
    layer = 4 * 32 + 32 + 2 * (32 + 16) + 16 + 32 + 3 * 64
    agent = AgentConfig(name="a", model=str(tmp_path))

    def kept(shape: PretrainedConfig) -> float:
        shape.save_pretrained(tmp_path)
        found = measure(str(tmp_path), agent, torch.float32, False)
        assert found is not None
        return found.kept / 4 / 2  # bytes of a number, layers

    assert kept(Qwen3Config(**SIZES, head_dim=8)) == layer + 64 + (2 * 32 + 16) + 32 + 16
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    routed = layer - 3 * 16 + 48 + (2 * 32 + 16) + 32 + 16
    assert kept(Qwen3MoeConfig(**SIZES, **experts, head_dim=8)) == routed
    (tmp_path / "config.json").write_text('{"model_type": "nobody_knows"}')
    assert measure(str(tmp_path), agent, torch.float32, False) is None


def test_doctor_says_whether_the_agents_of_a_device_fit(monkeypatch) -> None:
    """The agents of one device are counted together; cuda is cuda:0."""
    made = config({"model": "pocket:wren"}, {"model": "pocket:finch"})
    (found,) = doctor.memory_findings(made)
    assert found.good and found.what == "memory of cpu" and "learns" in found.detail
    monkeypatch.setattr(doctor, "device_memory", lambda device: 1e6)
    (found,) = doctor.memory_findings(made)
    assert not found.good and "microbatch_tokens" in found.detail
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    (found,) = doctor.memory_findings(
        config({"model": "pocket:wren"}, {"model": "pocket:finch", "device": "cuda:0"})
    )
    assert found.what == "memory of cuda:0"


def test_doctor_says_where_its_estimate_may_be_too_low(tmp_path: Path, llama: Path) -> None:
    latent = {
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "first_k_dense_replace": 2,
    }
    save_model(DeepseekV3Config(**SIZES, **latent), tmp_path, llama)
    agents = (
        {"model": str(tmp_path)},
        {"model": str(llama), "attention": "eager"},
        {"model": str(llama)},
    )
    (found,) = doctor.memory_findings(config(*agents))
    assert "The estimate for a0 may be too low (latent attention)" in found.detail
    assert "The estimate for a1 may be too low (attention = 'eager')" in found.detail
    assert "for a2" not in found.detail
