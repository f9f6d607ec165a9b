"""mlx-vlm's functions that find the module of a model and read its config.json."""

from __future__ import annotations

from typing import Any


def get_model_type(config: dict[str, Any]) -> str:
    return {"sketch-vl": "sketch"}.get(config["model_type"], config["model_type"])


def update_module_configs(
    model_config: Any, model_class: Any, config: dict[str, Any], modules: list[str]
) -> Any:
    for name in modules:
        if hasattr(model_config, f"{name}_config") and config.get(f"{name}_config") is not None:
            found = getattr(model_class, f"{name.title()}Config").from_dict(
                config[f"{name}_config"]
            )
            setattr(model_config, f"{name}_config", found)
    return model_config
