"""Settings of the clients that are used most, each as one line for a shell."""

from __future__ import annotations


def settings(url: str, context: int | None = None, key: str = "any") -> dict[str, str]:
    """The line of each client for a server at `url`, such as http://127.0.0.1:8080. `context`: tokens of the model's context."""
    window = "" if context is None else f" CLAUDE_CODE_MAX_CONTEXT_TOKENS={context}"
    models = "ANTHROPIC_MODEL=default_model ANTHROPIC_DEFAULT_HAIKU_MODEL=default_model"
    provider = f'model_providers.blockpool={{name="mlx-blockpool", base_url="{url}/v1"}}'
    return {
        "Claude Code": f"ANTHROPIC_BASE_URL={url} ANTHROPIC_AUTH_TOKEN={key} {models}{window} claude",
        "Codex": f"codex -c model=default_model -c model_provider=blockpool -c '{provider}'",
        "OpenAI's SDKs": f"export OPENAI_BASE_URL={url}/v1 OPENAI_API_KEY={key} OPENAI_MODEL=default_model",
    }
