"""Megatron ranks and vLLM engines as Ray actors pass the same contracts as everything else.

One Ray cluster for the module: two pipeline ranks, two engines.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from contracts.generator import (
    MAX_MODEL_TOKENS,
    STOP_TOKEN_IDS,
    TEMPERATURE,
    GeneratorContract,
    finish,
    request,
)
from contracts.policy import OPTIMIZER, PolicyContract
from tiny import save_tiny
from transformers import GenerationConfig
from weights.exchange import CPU, spec_of, state_of

from megatron_grpo.config import (
    ClusterConfig,
    MegatronPolicyConfig,
    ModelConfig,
    ParallelConfig,
    SamplingConfig,
    VllmGeneratorConfig,
)
from megatron_grpo.errors import CheckpointError, ClusterError, WeightExchangeError
from megatron_grpo.generation.engine_env import engine_env
from megatron_grpo.runtime.generator_proxy import RayGenerator
from megatron_grpo.runtime.placement import plan_placement
from megatron_grpo.runtime.policy_proxy import RayPolicy
from megatron_grpo.runtime.ray_cluster import Member, RayCluster, call_all
from megatron_grpo.weights.exchange import Exchange
from megatron_grpo.weights.layouts import FleetLayout, PolicyLayout
from megatron_grpo.weights.receiver import CollectiveReceiver
from megatron_grpo.weights.rendezvous import host_store, join_store
from megatron_grpo.weights.sender import CollectiveSender

pytestmark = pytest.mark.slow
RANKS, ENGINES = 2, 2
CLUSTER = ClusterConfig(step_deadline_s=120.0, start_deadline_s=240.0)
DEADLINE_S = 60.0
ENGINE = VllmGeneratorConfig(
    dtype="float32",
    engines=ENGINES,
    max_model_tokens=MAX_MODEL_TOKENS,
    kv_cache_bytes=64 << 20,
    max_concurrent=64,
)
# Three more bundles for the misbehaving members at the end.
PLACEMENT = plan_placement(RANKS, ENGINES + 3, 1, 0)


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    with RayCluster(CLUSTER, PLACEMENT) as running:
        yield running


class TestMegatronUnderRay(PolicyContract):
    @pytest.fixture(scope="class")
    def folder(self, tmp_path_factory) -> Path:
        return save_tiny(tmp_path_factory.mktemp("model"), "qwen2", tied=True)

    @pytest.fixture(scope="class")
    def policy(self, cluster, folder) -> Iterator[RayPolicy]:
        config = MegatronPolicyConfig(
            parallel=ParallelConfig(pipeline=RANKS),
            dtype="float32",
            microbatch_tokens=64,
            optimizer=OPTIMIZER,
        )
        members = [
            cluster.start(
                f"policy rank {rank}",
                rank,
                "megatron_grpo.policy.megatron.backend:MegatronRank",
                (config, ModelConfig(path=folder), 0, rank, RANKS, CLUSTER.start_deadline_s),
                {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
            )
            for rank in range(RANKS)
        ]
        policy = RayPolicy(members, CLUSTER)
        yield policy
        policy.close()

    @pytest.fixture(scope="class")
    def receiver(self, policy, folder) -> Iterator[CollectiveReceiver]:
        spec = spec_of(folder)
        exchange = Exchange(
            policy.open_channel(),
            PolicyLayout(pipeline=RANKS, layers=spec.num_layers),
            FleetLayout(layers=spec.num_layers),
            "float32",
            "gloo",
            1 << 16,
            DEADLINE_S,
            hosts=(policy.hosts, ("elsewhere",)),
        )
        with ThreadPoolExecutor(1) as pool:
            store = join_store(exchange.rendezvous, DEADLINE_S)
            end = pool.submit(CollectiveReceiver, store, exchange, spec, 0, CPU)
            policy.connect_weights(exchange)
            receiver = end.result(60)
        yield receiver
        receiver.close()

    @pytest.fixture
    def take_push(self, policy, receiver):
        def receive(version: int):
            held = dict(receiver.receive(version))
            receiver.confirm(version, [((name,), tensor) for name, tensor in held.items()])
            return held

        def take(version: int):
            with ThreadPoolExecutor(1) as pool:
                received = pool.submit(receive, version)
                report = policy.push_weights(version)
                return report, received.result(60)

        return take

    def test_the_layout_is_told_to_people(self, policy):
        assert policy.layout == "TP1 PP2 DP1"

    def test_a_failure_on_a_rank_names_the_rank_and_the_cause(self, policy, tmp_path):
        with pytest.raises(CheckpointError, match=r"policy rank [01], .*nowhere"):
            policy.load(tmp_path / "nowhere")


class TestVllmUnderRay(GeneratorContract):
    @pytest.fixture(scope="class")
    def source(self, tmp_path_factory) -> Path:
        # vLLM's CPU attention takes head sizes from 32 up; qwen2 here has 16.
        folder = save_tiny(tmp_path_factory.mktemp("source"), "qwen3", seed=0)
        GenerationConfig(eos_token_id=list(STOP_TOKEN_IDS)).save_pretrained(folder)
        return folder

    @pytest.fixture(scope="class")
    def other(self, tmp_path_factory) -> Path:
        return save_tiny(tmp_path_factory.mktemp("other"), "qwen3", seed=1)

    @pytest.fixture(scope="class")
    def generator(self, cluster, source) -> Iterator[RayGenerator]:
        sampling = SamplingConfig(temperature=TEMPERATURE, max_new_tokens=32)
        members = [
            cluster.start(
                f"engine {engine}",
                PLACEMENT.engine_bundle(engine),
                "megatron_grpo.generation.vllm_engine:VllmEngine",
                (ENGINE, ModelConfig(path=source), sampling),
                engine_env(ENGINE, 1, gpu=False),
            )
            for engine in range(ENGINES)
        ]
        generator = RayGenerator(members, 1, CLUSTER)
        yield generator
        generator.close()

    @pytest.fixture(scope="class")
    def sender(self, generator, source) -> Iterator[CollectiveSender]:
        store, rendezvous = host_store(DEADLINE_S)
        spec = spec_of(source)
        exchange = Exchange(
            rendezvous,
            PolicyLayout(layers=spec.num_layers),
            FleetLayout(ENGINES, layers=spec.num_layers),
            "float32",
            "gloo",
            1 << 16,
            DEADLINE_S,
            hosts=(("elsewhere",), generator.hosts),
        )
        with ThreadPoolExecutor(1) as pool:
            joined = pool.submit(generator.connect_weights, exchange)
            sender = CollectiveSender(store, exchange, spec, 0, CPU)
            joined.result(60)
        yield sender
        sender.close()

    @pytest.fixture(scope="class")
    def publish(self, generator, sender):
        def push(folder: Path, version: int):
            pull = generator.pull_weights(version)
            sender.send(version, state_of(folder))
            return pull.result(60)

        return push

    def test_both_engines_are_given_work(self, generator, version):
        prompts = [(5, 6, 7), (8, 9), (10, 11), (12, 13)]
        finish(generator, [request(prompt, seed=1, tokens=4) for prompt in prompts])
        assert generator.version == version


def start_sleeper(cluster: RayCluster, bundle: int) -> Member:
    target = "runtime.sleeper:Sleeper"
    return cluster.start("sleeper", PLACEMENT.engine_bundle(bundle), target, (), {})


def test_a_call_on_a_member_that_is_late_names_it(cluster):
    member = cluster.start("sleeper", PLACEMENT.engine_bundle(0), "runtime.sleeper:Sleeper", (), {})
    with pytest.raises(ClusterError, match=r"nap: no answer within 2 s from sleeper"):
        call_all([member], "nap", [(60.0,)], 2.0)


def test_an_error_of_ours_keeps_its_class_and_gains_the_members_name(cluster):
    member = start_sleeper(cluster, 3)
    with pytest.raises(WeightExchangeError, match=r"sleeper, tensor w: is gone"):
        call_all([member], "fail", [()], 60.0)


def test_i5_the_death_of_a_member_is_told_by_name_and_call(cluster):
    member = start_sleeper(cluster, 4)
    with pytest.raises(ClusterError, match=r"sleeper: died during die"):
        call_all([member], "die", [()], 60.0)
