"""Which models requests may name, under which names, and what answers say of where they lie."""

from __future__ import annotations

import json
import os
import threading
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mlx_lm.server import ModelDescription
from models import save_model

from mlx_blockpool.config import ModelsConfig
from mlx_blockpool.errors import BlockpoolError, ModelNotFoundError
from mlx_blockpool.server.app import check_default, make_generator
from mlx_blockpool.server.models import catalog, inspection
from mlx_blockpool.server.models.catalog import Catalog
from mlx_blockpool.server.provider import BlockpoolModelProvider, ModelKey
from server.serving import Client, blockpool_server, parse

HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models, and one of the same name one folder deeper."""
    root = tmp_path_factory.mktemp("models")
    save_model(root / "one", "llama")
    save_model(root / "two", "llama", seed=2)
    save_model(root / "theirs" / "two", "llama", seed=3)
    return root


@pytest.fixture(scope="module")
def listing(folder: Path) -> Iterator[Client]:
    with blockpool_server(folder / "one", "--pool-bytes", "20MB") as running:
        yield running


def make(model: Path | str | None, *options: str, **config: Any) -> Catalog:
    args = parse([*([] if model is None else ["--model", str(model)]), *options])
    names = {
        "allowed": args.allow_models,
        "downloads": args.allow_downloads,
        "aliases": args.model_aliases,
    }
    return Catalog(BlockpoolModelProvider(args), ModelsConfig(**{**names, **config}))


def key(
    found: Catalog,
    model: str | None,
    adapter: str | None = None,
    draft: str | None = "default_model",
) -> ModelKey:
    return found.key_of(ModelDescription(model, draft, adapter))  # type: ignore[arg-type]


def ask(client: Client, model: Any, **options: Any) -> tuple[int, Any]:
    return client.send(
        "/v1/chat/completions", {"messages": HELLO, "max_tokens": 1, "model": model, **options}
    )


# -- folders ---------------------------------------------------------------------------------------


def test_folders_from_requests_are_refused_whether_they_are_there_or_not(
    listing: Client, folder: Path
) -> None:
    for name in (
        str(folder / "two"),
        "/no/such/folder",
        "/proc/self/cwd",
        "/proc/self/environ",
        "..",
        ".",
        "",
        "~",
        "../one",
        "a\\b",
    ):
        for answer in (ask(listing, name), listing.send("/admin/load", {"model": name})):
            text = json.dumps(answer[1])
            assert answer[0] == 404, name
            assert "There is no model" in text
            there = text.replace(json.dumps(name)[1:-1], "").replace(name, "")
            assert str(folder) not in there
            assert str(Path.cwd()) not in there, name
    for part in ("adapters", "draft_model"):
        assert (
            ask(
                listing,
                "default_model" if part == "draft_model" else "one",
                **{part: str(folder / "two")},
            )[0]
            == 404
        )


def test_a_folder_is_named_by_its_name_or_its_path(folder: Path) -> None:
    found = make(folder / "one", "--allow-models", f"{folder}/two")
    expected = ModelKey(str(folder / "two"))
    for name in ("two", str(folder / "two"), f"{folder}/one/../two", f"{folder}/two/"):
        assert key(found, name) == expected
    assert (
        key(found, "one")
        == key(found, None)
        == key(found, "default_model")
        == ModelKey(str(folder / "one"))
    )


def test_a_folder_of_models_stands_for_those_in_it(folder: Path) -> None:
    found = make(folder / "one", "--allow-models", str(folder))
    assert list(found.ids()) == ["one", "two", "two@2"]
    assert {key(found, name).model for name in found.ids()} == {
        str(folder / p) for p in ("one", "two", "theirs/two")
    }
    with pytest.raises(ModelNotFoundError):
        key(found, str(folder))


def test_a_link_in_a_request_leads_only_to_what_is_allowed(folder: Path, tmp_path: Path) -> None:
    found = make(folder / "one", "--allow-models", str(folder / "theirs"))
    for name, target in (("inside", folder / "theirs" / "two"), ("outside", folder / "two")):
        (tmp_path / name).symlink_to(target)
    assert key(found, str(tmp_path / "inside")).model == str(folder / "theirs" / "two")
    with pytest.raises(ModelNotFoundError):
        key(found, str(tmp_path / "outside"))
    with pytest.raises(ModelNotFoundError):
        key(found, f"{folder}/theirs/../two")


def test_a_hub_id_is_never_a_folder_of_the_place_where_the_server_was_started(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_model(tmp_path / "some" / "model", "llama")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelNotFoundError):
        key(make(folder / "one"), "some/model")
    assert key(make("some/model"), None) == ModelKey(str(tmp_path / "some" / "model"))


def test_answers_do_not_say_where_models_lie(folder: Path, tmp_path: Path) -> None:
    broken = save_model(tmp_path / "broken", "llama")
    (broken / "model.safetensors").write_bytes(b"\0" * 64)
    odd = save_model(tmp_path / "odd", "llama", seed=4)
    (odd / "config.json").write_text(
        json.dumps({**json.loads((odd / "config.json").read_text()), "num_hidden_layers": 3})
    )
    with blockpool_server(
        folder / "one", "--allow-models", str(tmp_path), "--pool-bytes", "20MB", "--max-models", "2"
    ) as ours:
        answers = [ask(ours, name) for name in ("broken", "odd", "one")]
        assert [status for status, _ in answers] == [400, 400, 200]
        answers += [
            ours.send(path)
            for path in ("/v1/models", "/admin/models", "/v1/cache", "/v1/requests", "/v1/agents")
        ]
        answers += [ours.send("/admin/load", {"model": name}) for name in ("broken", "one")]
    text = json.dumps(answers)
    assert str(tmp_path) not in text
    assert str(folder) not in text
    assert "broken" in text


# -- the hub ---------------------------------------------------------------------------------------


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The hub's cache, with one model in it."""
    root = tmp_path / "hub"
    snapshot = root / "models--some--model" / "snapshots" / "1234"
    save_model(snapshot, "llama", seed=5)
    (snapshot / "model.safetensors.index.json").write_text("{}")
    refs = root / "models--some--model" / "refs"
    refs.mkdir()
    (refs / "main").write_text("1234")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(root))
    monkeypatch.setattr(
        "huggingface_hub.utils._cache_manager.HF_HUB_CACHE", str(root), raising=False
    )
    return root


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the hub is asked for, of which it answers nothing."""
    asked: list[str] = []

    def refuse(name: str, *_: Any, **__: Any) -> Any:
        asked.append(name)
        raise OSError("the hub was asked")

    monkeypatch.setattr(inspection, "snapshot_download", refuse)
    monkeypatch.setattr(inspection, "HfApi", lambda: types.SimpleNamespace(model_info=refuse))
    return asked


def test_a_request_never_asks_the_hub_unless_it_may(listing: Client, no_network: list[str]) -> None:
    for name in ("nobody/has-this", "gpt2/x", "a/b"):
        status, answer = ask(listing, name)
        assert status == 404
        assert "--allow-downloads" in answer["error"]["message"]
    assert no_network == []


def test_a_downloaded_model_is_served_by_its_id(
    folder: Path, hub: Path, no_network: list[str]
) -> None:
    with blockpool_server(folder / "one", "--pool-bytes", "20MB") as ours:
        assert ask(ours, "some/model")[0] == 200
        listed = {m["id"]: m["mlx_blockpool"]["state"] for m in ours.send("/v1/models")[1]["data"]}
    assert listed == {"some/model": "loaded", "one": "available", "default_model": "available"}
    assert no_network == []


def test_where_models_are_listed_a_downloaded_one_beside_them_is_not_served(
    folder: Path, hub: Path
) -> None:
    found = make(folder / "one", "--allow-models", str(folder / "two"))
    with pytest.raises(ModelNotFoundError):
        key(found, "some/model")


def test_downloads_are_an_option_and_wait_for_the_hub_only_so_long(
    folder: Path, monkeypatch: pytest.MonkeyPatch, no_network: list[str]
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    found = make(folder / "one", "--allow-downloads")
    assert key(found, "some/other").model == "some/other"
    with pytest.raises(ModelNotFoundError, match="the hub was asked"):
        inspection.folder_of("some/other", found, 5.0)
    assert no_network == ["some/other"]
    # A network that never answers.
    over = threading.Event()
    monkeypatch.setattr(
        inspection, "HfApi", lambda: types.SimpleNamespace(model_info=lambda *_, **__: over.wait())
    )
    with pytest.raises(ModelNotFoundError, match=r"did not answer within 0\.01 seconds"):
        inspection.folder_of("some/other", found, 0.01)
    over.set()


def test_offline_the_hub_is_not_asked(
    folder: Path, monkeypatch: pytest.MonkeyPatch, no_network: list[str]
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelNotFoundError, match="HF_HUB_OFFLINE"):
        inspection.folder_of("some/other", make(folder / "one", "--allow-downloads"), 5.0)
    assert no_network == []


# -- aliases ---------------------------------------------------------------------------------------


def test_where_one_model_is_served_it_answers_to_names_that_nobody_knows(
    listing: Client, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("sonnet", "claude-sonnet-4-5-20250929", "gpt-4o", "gpt-5.1-codex", "qwen3:8b"):
        assert ask(listing, name)[0] == 200, name
    said = {"model": "claude-opus-4", "max_tokens": 1, "messages": HELLO}
    assert listing.send("/v1/messages", said)[0] == 200
    assert listing.send("/admin/models")[1]["counts"]["loads"] == 1
    with caplog.at_level("INFO"):
        make(folder / "one").log_names()
    assert sum("--model-aliases" in record.message for record in caplog.records) == 1


@pytest.mark.parametrize(
    "options",
    [
        ("--model-aliases", "off"),
        ("--max-models", "2"),
        ("--allow-models", "{}/two"),
        ("--model-aliases", "sonnet=one"),
    ],
)
def test_elsewhere_an_unknown_name_is_a_404(folder: Path, options: tuple[str, str]) -> None:
    args = [option.format(folder) for option in options]
    found = make(folder / "one", *args, max_models=2 if "--max-models" in args else 1)
    with pytest.raises(ModelNotFoundError, match="gpt-4o"):
        key(found, "gpt-4o")


def test_aliases_are_those_that_were_given(folder: Path) -> None:
    found = make(
        folder / "one",
        "--allow-models",
        str(folder),
        "--model-aliases",
        "sonnet=two,org/big=default_model",
    )
    assert key(found, "sonnet").model == str(folder / "two")
    assert key(found, "org/big").model == str(folder / "one")
    with pytest.raises(BlockpoolError, match="--model-aliases: sonnet"):
        make(folder / "one", "--model-aliases", "sonnet=nothing/there")
    with pytest.raises(SystemExit):
        parse(["--model-aliases", "sonnet"])


def test_a_name_of_a_downloaded_model_is_no_alias(folder: Path, hub: Path) -> None:
    assert key(make(folder / "one"), "some/model").model == "some/model"


def test_without_a_model_nothing_is_an_alias() -> None:
    with pytest.raises(ModelNotFoundError):
        key(make(None), "sonnet")
    with pytest.raises(ValueError, match="without --model"):
        key(make(None), None)


def test_an_alias_has_the_adapter_of_the_model_that_it_stands_for(
    folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    found = make(folder / "one", "--adapter-path", str(tmp_path))
    expected = ModelKey(str(folder / "one"), str(tmp_path))
    assert [key(found, name) for name in ("sonnet", "one", "default_model", None)] == [expected] * 4


# -- words -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("no file /home/ann/models/x/config.json here", "no file config.json here"),
        ("[Errno 2] '/home/ann/x.txt'", "[Errno 2] 'x.txt'"),
        (
            "1/2 of https://example.org/a/b and org/model",
            "1/2 of https://example.org/a/b and org/model",
        ),
    ],
)
def test_paths_are_taken_out_of_messages(folder: Path, text: str, expected: str) -> None:
    assert make(folder / "one").hide(text) == expected


def test_a_folder_with_spaces_is_its_id_in_messages(tmp_path: Path) -> None:
    model = save_model(tmp_path / "my models" / "one", "llama")
    found = make(model)
    assert found.hide(f"cannot read {model}: no", key(found, None)) == "cannot read one: no"


def test_a_model_that_came_after_the_last_scan_is_found_by_its_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalog, "SCAN_REST", 1e9)
    found = make(
        None, "--allow-models", str(save_model(tmp_path / "allowed" / "old", "llama").parent)
    )
    assert list(found.ids()) == ["old"]
    places = ("allowed/new", "allowed/new/in a model", "allowed/a/b/deep", "beside")
    come = [save_model(tmp_path / place, "llama") for place in places]
    assert key(found, str(come[0])) == ModelKey(str(come[0]))
    for elsewhere in come[1:]:
        with pytest.raises(ModelNotFoundError):
            key(found, str(elsewhere))


def test_what_is_looked_at_stays_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ModelsConfig, "folders", 3)
    for i in range(5):
        save_model(tmp_path / f"m{i}", "llama")
    assert len(make(None, "--allow-models", str(tmp_path)).ids()) == 3


def test_the_server_looks_at_its_model_before_it_starts(folder: Path, tmp_path: Path) -> None:
    bad = save_model(tmp_path / "bad", "llama")
    os.truncate(bad / "model.safetensors", 10)
    with pytest.raises(BlockpoolError, match="Cannot serve"):
        check_default(BlockpoolModelProvider(parse(["--model", str(bad)])))


def test_a_generator_whose_model_cannot_be_loaded_ends_as_mlx_lms_does(tmp_path: Path) -> None:
    generator = make_generator(
        BlockpoolModelProvider(parse(["--model", str(tmp_path), "--no-store"]))
    )
    generator.join()
    assert not generator.generation_available()
    with pytest.raises(RuntimeError, match="generation thread died"):
        generator.generate(None, None)
    with pytest.raises(BlockpoolError, match="Cannot serve"):
        generator.wait_until_loaded()
