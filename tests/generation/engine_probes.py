"""Looks inside a VllmEngine, in its own process: what vLLM was finally told and what it did."""

from __future__ import annotations


def probe_parameters(engine) -> dict[str, dict[str, object]]:
    """Request id -> what vLLM's scheduler holds about each request in flight."""
    requests = engine._engine.engine_core.engine_core.scheduler.requests.values()
    states = engine._engine.output_processor.request_states
    names = {internal: state.external_req_id for internal, state in states.items()}
    fields = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty")
    fields += ("frequency_penalty", "max_tokens", "min_tokens", "seed", "eos_token_id", "stop")
    fields += ("stop_token_ids", "logit_bias", "bad_words")
    return {
        names[request.request_id]: {
            "prompt": list(request.prompt_token_ids),
            **{field: getattr(request.sampling_params, field) for field in fields},
        }
        for request in requests
    }


def probe_cached_tokens(engine, request) -> int:
    """Run one request; how many of its prompt tokens came from the prefix cache."""
    engine.submit([request])
    while True:
        for output in engine._engine.step():
            if output.finished:
                engine._finish(output.request_id, output.outputs[0])
                engine.collect(0.0)
                return output.num_cached_tokens


def probe_step_until(engine, request_id: str, tokens: int) -> int:
    """Step until a request has so many tokens, and has not finished; how many it has."""
    processor = engine._engine.output_processor
    (internal,) = processor.external_req_ids[request_id]
    state = processor.request_states[internal]
    while state.detokenizer.num_output_tokens() < tokens:
        for output in engine._engine.step():
            engine._finish(output.request_id, output.outputs[0])
    return state.detokenizer.num_output_tokens()


def probe_running_requests(engine, rule: str) -> None:
    """Change weights.running_requests of an engine that has joined the channel."""
    engine._running_requests = rule


def probe_pretend_version(engine, version: int) -> None:
    """Let an engine work under the weights it started with."""
    engine._version = version
    engine._engine.set_weight_version(str(version))


def probe_holdings(engine) -> dict:
    """Names -> elements, of everything the one worker of an engine holds."""
    from megatron_grpo.conversion.config_json import read_model_spec
    from megatron_grpo.generation.vllm_holdings import Holdings

    spec = read_model_spec(engine._folder / "config.json")
    [holdings] = engine._engine.apply_model(
        lambda model: {
            tuple(names): held.clone()
            for names, held in Holdings(model, list(spec.hf_names()), tied=spec.tied).read()
        }
    )
    return holdings
