"""Models to and from Hugging Face folders, beside transformers on random weights."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests import warm
from tests.text.hf_models import CASES, DEEPSEEK_V3, LLAMA4, QWEN3_MOE, SMALL, STRETCHED, YARN, hf_folder, hf_model
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.functional import cross_entropy

from arclight.parallel import initialize
from arclight.text import ByteTokenizer, Tokenizer, build_model, from_hf, generate, to_hf
from arclight.text.hf.read import Folder
from arclight.text.hf.registry import family_of_type


def tokens(seed: int = 1) -> torch.Tensor:
    return torch.randint(0, 256, (2, 48), generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Any]]:
    root = tmp_path_factory.mktemp("hf")
    return {case: (root / case, hf_folder(case, root / case)) for case in CASES}


@pytest.mark.parametrize("case", CASES)
def test_logits_and_gradients_are_those_of_transformers(case: str, folders: Any) -> None:
    folder, theirs = folders[case]
    ours, ids = from_hf(folder), tokens()
    logits, expected = ours(ids), theirs(ids).logits
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)
    for out in (logits, expected):
        cross_entropy(out[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
    with (
        torch.no_grad()
    ):  # gradients compared in places of ours: a model whose weights are their gradients is written and read
        for parameter in theirs.parameters():
            parameter.data, parameter.grad = parameter.grad, None
    theirs.save_pretrained(folder.with_name(f"{case}-gradients"))
    gradients = dict(from_hf(folder.with_name(f"{case}-gradients")).named_parameters())
    assert len(gradients) == len(list(ours.named_parameters()))
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=0, atol=1e-6, msg=name)


@pytest.mark.parametrize("case", CASES)
def test_a_round_trip_keeps_every_bit_and_transformers_opens_it(case: str, folders: Any, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    model = from_hf(folders[case][0])
    to_hf(model, tmp_path / "out", max_shard_size="100KB")
    assert (tmp_path / "out" / "model.safetensors.index.json").is_file()
    assert max(file.stat().st_size for file in (tmp_path / "out").glob("*.safetensors")) < 150_000
    again = from_hf(tmp_path / "out")
    assert again.config == model.config
    assert again.state_dict().keys() == model.state_dict().keys()
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in model.state_dict().items())
    theirs, report = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    torch.testing.assert_close(model(tokens()), theirs(tokens()).logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize("case", CASES)
def test_a_model_of_transformers_is_read_as_its_folder_is(case: str, folders: Any) -> None:
    theirs = hf_model(case)
    ours, same = from_hf(theirs), from_hf(folders[case][0])
    kept = {name: tensor.clone() for name, tensor in ours.state_dict().items()}
    assert kept.keys() == same.state_dict().keys()
    assert all(torch.equal(tensor, kept[name]) for name, tensor in same.state_dict().items())
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.zero_()
    assert all(torch.equal(tensor, kept[name]) for name, tensor in ours.state_dict().items())  # copied


def test_a_model_in_memory_keeps_its_type_and_what_is_no_such_model_is_refused(folders: Any) -> None:
    theirs = hf_model("llama").bfloat16()
    assert {p.dtype for p in from_hf(theirs).parameters()} == {torch.bfloat16}
    assert {p.dtype for p in from_hf(theirs, dtype=torch.float32).parameters()} == {torch.float32}
    given = build_model("llama3-debug", layers=3)
    with pytest.raises(ValueError, match="dim is 64 in the source, 256 in the model"):
        from_hf(theirs, given)
    with pytest.raises(TypeError, match="Llama is not a model of transformers"):
        from_hf(given)
    with pytest.raises(ValueError, match="is on meta and has no values"):
        from_hf(theirs.to("meta"))


def test_tied_weights_are_written_once_and_stay_tied(folders: Any, tmp_path: Path) -> None:
    model = from_hf(folders["qwen3-tied"][0])
    assert model.output.weight is model.tok_embeddings.weight
    to_hf(model, tmp_path / "out")
    file = load_file(tmp_path / "out" / "model.safetensors")
    assert "lm_head.weight" not in file
    save_file(
        file | {"lm_head.weight": file["model.embed_tokens.weight"].clone()}, tmp_path / "out" / "model.safetensors"
    )
    torch.testing.assert_close(from_hf(tmp_path / "out")(tokens()), model(tokens()), rtol=0, atol=0)
    save_file(file | {"lm_head.weight": file["model.embed_tokens.weight"] + 1}, tmp_path / "out" / "model.safetensors")
    with pytest.raises(ValueError, match="set tie_word_embeddings to false"):
        from_hf(tmp_path / "out")


def test_files_of_the_trunk_alone_have_no_prefix(folders: Any, tmp_path: Path) -> None:
    folder, _ = folders["gpt2"]
    shutil.copytree(folder, tmp_path / "bare")
    file = load_file(folder / "model.safetensors")
    bare = {name.removeprefix("transformer."): value for name, value in file.items()}
    bare["h.0.attn.bias"] = torch.ones(1, 1, 64, 64)  # the triangle that old files have, nothing learned
    save_file(bare, tmp_path / "bare" / "model.safetensors")
    torch.testing.assert_close(from_hf(tmp_path / "bare")(tokens()), from_hf(folder)(tokens()), rtol=0, atol=0)


def test_a_model_of_integers_is_refused(folders: Any) -> None:
    theirs = hf_model("llama")
    theirs.lm_head.weight = torch.nn.Parameter(theirs.lm_head.weight.to(torch.int32), requires_grad=False)
    with pytest.raises(ValueError, match=r"no floating-point numbers .*: lm_head\.weight \(INT32\)$"):
        from_hf(theirs)


def test_a_given_model_is_filled_in_its_own_type_and_place(folders: Any) -> None:
    folder, _ = folders["qwen3-tied"]
    whole = from_hf(folder)
    with torch.device("meta"):
        model = type(whole)(whole.config).to(torch.bfloat16)
    del model.layers["1"]
    model.norm = None  # what a pipeline stage lacks, the folder has for others
    model = from_hf(folder, model=model)
    assert model.output.weight is model.tok_embeddings.weight
    for name, parameter in model.named_parameters():
        assert parameter.dtype == torch.bfloat16
        assert torch.equal(parameter, whole.get_parameter(name).bfloat16()), name
    last = type(whole)(whole.config)
    del last.layers["0"], last.layers["1"]
    last.tok_embeddings = None  # whose weights are the output's, which this stage has
    assert torch.equal(from_hf(folder, model=last).output.weight, whole.tok_embeddings.weight)
    assert from_hf(folder, dtype=torch.float64).norm.weight.dtype == torch.float64


def test_unsupported_folders_are_refused_by_name(folders: Any, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nothing is downloaded"):
        from_hf("meta-llama/Llama-3.1-8B")
    with pytest.raises(FileNotFoundError, match=r"no config\.json"):
        from_hf(tmp_path)
    shutil.copytree(folders["llama"][0], tmp_path / "m")
    settings = json.loads((tmp_path / "m" / "config.json").read_text())
    file = load_file(tmp_path / "m" / "model.safetensors")

    def changed(match: str, weights: dict[str, Any] | None = None, **fields: Any) -> None:
        (tmp_path / "m" / "config.json").write_text(json.dumps(settings | fields))
        save_file(weights if weights is not None else file, tmp_path / "m" / "model.safetensors")
        with pytest.raises(ValueError, match=match):
            from_hf(tmp_path / "m")

    changed("knows only 'silu'", hidden_act="relu")
    changed("model_type 'mamba'", model_type="mamba")
    changed("as 'yarn'", rope_parameters={"rope_type": "yarn", "factor": 4.0})
    changed("has no factor, which rotary embeddings", rope_parameters={"rope_type": "llama3"})
    changed("has factor = 0: need a number above 0", rope_parameters=STRETCHED | {"factor": 0})
    changed(
        "has original_max_position_embeddings = 1.5: need a whole",
        rope_parameters=STRETCHED | {"original_max_position_embeddings": 1.5},
    )
    changed("quantized as 'gptq'", quantization_config={"quant_method": "gptq"})
    changed("lacks the weights of layers.3.attention_norm.weight", num_hidden_layers=4)
    changed(r"no place for: model\.layers\.2\.input_layernorm", num_hidden_layers=2)
    changed(r"shapes differ: model\.layers\.0\.mlp", intermediate_size=128)
    up = "model.layers.0.mlp.up_proj.weight"
    changed(rf"no floating-point numbers .*: {up} \(I8\)$", file | {up: file[up].to(torch.int8)})
    changed("lacks the weights of norm.weight", {k: v for k, v in file.items() if k != "model.norm.weight"})
    shutil.copytree(folders["llama4"][0], tmp_path / "four")
    four = json.loads((tmp_path / "four" / "config.json").read_text())
    four["no_rope_layers"] = [0] * four["num_hidden_layers"]
    (tmp_path / "four" / "config.json").write_text(json.dumps(four))
    with pytest.raises(
        ValueError, match=r"has no_rope_layers = \[0.*regular intervals \(no_rope_layer_interval\): \[1"
    ):
        from_hf(tmp_path / "four")
    four |= {"no_rope_layers": [], "layer_types": ["full_attention"] * four["num_hidden_layers"]}
    (tmp_path / "four" / "config.json").write_text(json.dumps(four))
    with pytest.raises(ValueError, match=r"has layer_types = \['full.*\['chunked_attention', 'ch"):
        from_hf(tmp_path / "four")
    shutil.copytree(folders["qwen3-moe"][0], tmp_path / "moe")
    experts = load_file(tmp_path / "moe" / "model.safetensors")
    save_file(
        {name: w for name, w in experts.items() if not re.search(r"\.0\.mlp\.experts\.[35]\.", name)},
        tmp_path / "moe" / "model.safetensors",
    )
    with pytest.raises(
        ValueError, match=r"lacks the weights of layers\.0\.feed_forward\.experts\.w1 \(experts 3, 5 of 8\), "
    ):
        from_hf(tmp_path / "moe")
    (tmp_path / "m" / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="must be converted to safetensors"):
        from_hf(tmp_path / "m")
    with pytest.raises(ValueError, match="layers is 3 in the source, 6 in the model"):
        from_hf(folders["llama"][0], model=build_model("llama3-debug"))
    with pytest.raises(ValueError, match="the given one is a Qwen3"):
        from_hf(folders["llama"][0], model=build_model("qwen3-debug", layers=1))


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", r"config\.json is not valid JSON"),
        ("[1]", r"config\.json holds a list, and a model's settings are a table"),
        ({"hidden_size": None}, "has hidden_size = None: need a whole number of 1 or more"),
        ({"num_hidden_layers": -1}, "has num_hidden_layers = -1: need a whole number of 1 or more"),
        ({"num_key_value_heads": 1.5}, r"has num_key_value_heads = 1\.5: need a whole number"),
        ({"rms_norm_eps": None}, "has rms_norm_eps = None: need a number above 0"),
        ({"rope_theta": 0}, "has rope_theta = 0: need a number above 0"),
        ({"rope_scaling": True}, "has rope_scaling = True: need a table, or null"),
        (
            {"rope_scaling": STRETCHED, "rope_parameters": {"type": "default", "rope_theta": 500000.0}},
            "has rope_type = 'llama3' in rope_scaling and 'default' in rope_parameters: leave one table out",
        ),
        ({"quantization_config": [1]}, r"has quantization_config = \[1\]: need a table, or null"),
        (
            {"quantization_config": {"quant_method": "fp8", "weight_block_size": [0, 128]}},
            "has weight_block_size = 0: need a whole number of 1 or more",
        ),
        ({"tie_word_embeddings": "no"}, "has tie_word_embeddings = 'no': need true or false"),
    ],
)
def test_settings_of_other_types_are_refused(tmp_path: Path, content: Any, says: str) -> None:
    usual = {
        "model_type": "llama", "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4,
        "intermediate_size": 64, "max_position_embeddings": 128,
    }  # fmt: skip
    text = content if isinstance(content, str) else json.dumps(usual | content)
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=says):
        from_hf(tmp_path)


@pytest.mark.parametrize(
    ("kind", "field", "value", "need"),
    [
        ("gpt2", "n_head", 0, "a whole number of 1 or more"),
        ("gpt2", "n_layer", 0, "a whole number of 1 or more"),
        ("mpt", "n_heads", 0, "a whole number of 1 or more"),
        ("siglip2_vision_model", "num_attention_heads", 0, "a whole number of 1 or more"),
        ("llama4_text", "floor_scale", 0, "a number above 0"),
        ("llama4_text", "attention_chunk_size", 0, "a whole number of 1 or more"),
        ("llama4_text", "no_rope_layer_interval", 0, "a whole number of 1 or more"),
        ("llama4_text", "interleave_moe_layer_step", None, "a whole number of 1 or more"),
        ("mpt", "attn_config", 1, "a table, or null"),
        ("deepseek_v3", "first_k_dense_replace", -1, "a whole number of 0 or more"),
        ("deepseek_v3", "norm_topk_prob", 0, "true or false"),
        ("qwen3_moe", "norm_topk_prob", "false", "true or false"),
    ],
)
def test_sizes_with_a_default_are_above_zero(tmp_path: Path, kind: str, field: str, value: Any, need: str) -> None:
    sizes = SMALL | {"intermediate_size_mlp": 80}
    (tmp_path / "config.json").write_text(json.dumps(sizes | {"model_type": kind, field: value}))
    with pytest.raises(ValueError, match=f"has {field} = {value!r}: need {need}"):
        from_hf(tmp_path)


@pytest.mark.parametrize(
    ("kind", "theirs"),
    [
        ("Llama", SMALL),
        ("Qwen3", SMALL),
        ("Qwen3Moe", QWEN3_MOE),
        ("DeepseekV3", DEEPSEEK_V3),
        ("Llama4Text", LLAMA4 | {"attn_scale": 0.2}),
        ("GPT2", {"num_attention_heads": 3, "num_hidden_layers": 2, "hidden_size": 48, "n_inner": 192}),
        ("GPT2", {"n_inner": 3072, "max_position_embeddings": 64}),
        ("Mpt", {"num_attention_heads": 4, "hidden_size": 64}),
    ],
)
def test_fields_that_are_left_out_are_read_as_transformers_reads_them(kind: str, theirs: dict[str, Any]) -> None:
    config = getattr(pytest.importorskip("transformers"), f"{kind}Config").from_dict(dict(theirs))
    family = family_of_type(config.model_type)
    read, expected = (family.config(**family.read(fields)) for fields in (theirs, config.to_dict()))
    if "head_dim" not in theirs and kind == "Llama":
        expected = dataclasses.replace(expected, head_dim=None)
    assert read == expected


def test_the_scale_of_growing_queries_is_a_number() -> None:
    family = family_of_type("llama4_text")
    for scale in ("0.1", -0.1, float("nan")):
        with pytest.raises(ValueError, match="temperature: need number >= 0"):
            family.config(**family.read(LLAMA4 | {"attn_scale": scale}))


@pytest.mark.parametrize(("field", "value"), [("attention_factor", 1.2), ("truncate", False)])
def test_ways_of_yarn_that_no_model_here_has_are_refused(tmp_path: Path, field: str, value: Any) -> None:
    theirs = DEEPSEEK_V3 | {"model_type": "deepseek_v3", "rope_scaling": YARN | {field: value}}
    (tmp_path / "config.json").write_text(json.dumps(theirs))
    with pytest.raises(ValueError, match=rf"has {field} = {value}; the model here knows only"):
        from_hf(tmp_path)


def test_queries_that_do_not_grow_stay_so(tmp_path: Path) -> None:
    model = build_model("llama4-debug", layers=1, temperature=0.0)
    to_hf(model, tmp_path / "out")
    assert from_hf(tmp_path / "out").config.temperature == 0.0


def test_settings_may_begin_with_a_mark_and_the_floor_of_llama4_be_a_float(folders: Any, tmp_path: Path) -> None:
    folder, _ = folders["llama4"]
    shutil.copytree(folder, tmp_path / "m")
    settings = json.loads((folder / "config.json").read_text())
    (tmp_path / "m" / "config.json").write_text(json.dumps(settings | {"floor_scale": 8.0}), encoding="utf-8-sig")
    assert torch.equal(from_hf(tmp_path / "m")(tokens()), from_hf(folder)(tokens()))


def test_writing_spoils_nothing(folders: Any, tmp_path: Path) -> None:
    model = from_hf(folders["llama"][0])
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("keep")
    with pytest.raises(FileExistsError, match="not empty"):
        to_hf(model, tmp_path / "out")
    with pytest.raises(ValueError, match="is not a size"):
        to_hf(model, tmp_path / "new", max_shard_size="5 apples")
    with pytest.raises(TypeError, match="Linear has no names at Hugging Face"):
        to_hf(torch.nn.Linear(2, 2), tmp_path / "new")
    model.output = None
    with pytest.raises(ValueError, match="pipeline stage"):
        to_hf(model, tmp_path / "new")
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "mine.txt"]


def test_weights_in_another_type_and_the_tokenizer_beside_them(folders: Any, tmp_path: Path) -> None:
    model = from_hf(folders["llama"][0])
    to_hf(model, tmp_path / "out", dtype=torch.bfloat16, tokenizer=ByteTokenizer())
    again = from_hf(tmp_path / "out")
    assert {parameter.dtype for parameter in again.parameters()} == {torch.bfloat16}
    assert torch.equal(again.norm.weight, model.norm.weight.bfloat16())
    assert ByteTokenizer.load(tmp_path / "out").encode("é") == [195, 169]


def test_transformers_writes_what_we_write_from_a_folder_with_a_tokenizer(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = Tokenizer.train(["def main():\n    return [i for i in range(10)]\n" * 20], 280)
    model = build_model(
        "llama3-debug", layers=2, vocab_size=tokenizer.vocab_size, dim=64, heads=4, kv_heads=2, tied=True
    )
    initialize(model, seed=0)
    with torch.no_grad():
        model.tok_embeddings.weight.mul_(20)
    to_hf(model, tmp_path / "out", tokenizer=tokenizer)
    theirs, text = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out"), "def main"
    reader = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    ids = reader(text, return_tensors="pt", add_special_tokens=False).input_ids
    assert ids[0].tolist() == tokenizer.encode(text)
    assert theirs.config.eos_token_id == tokenizer.eos
    written = theirs.generate(ids, max_new_tokens=20, do_sample=False)
    assert reader.decode(written[0, ids.shape[1] :], skip_special_tokens=True) == generate(
        from_hf(tmp_path / "out"), Tokenizer.load(tmp_path / "out"), text, 20, temperature=0
    )


def test_wrappers_of_blocks_leave_no_trace_in_files(folders: Any, tmp_path: Path) -> None:
    model = from_hf(folders["llama"][0])
    model.layers["0"] = checkpoint_wrapper(model.layers["0"])
    model.layers["1"] = torch.compile(model.layers["1"], backend="eager")
    to_hf(model, tmp_path / "out")
    assert from_hf(tmp_path / "out").state_dict().keys() == from_hf(folders["llama"][0]).state_dict().keys()
    with torch.no_grad():
        model.layers["1"].attention.wq.weight.zero_()
    assert from_hf(folders["llama"][0], model=model).layers["1"].attention.wq.weight.abs().sum() > 0


def test_eight_bit_blocks_are_multiplied_by_their_scales(folders: Any, tmp_path: Path) -> None:
    folder, _ = folders["llama"]
    shutil.copytree(folder, tmp_path / "m")
    weights, name = load_file(folder / "model.safetensors"), "model.layers.0.self_attn.q_proj.weight"
    value = weights[name]
    scales = torch.rand(-(-value.shape[0] // 40), -(-value.shape[1] // 24)) + 0.5  # blocks that do not divide
    small, expected = torch.zeros_like(value, dtype=torch.float8_e4m3fn), torch.empty_like(value)
    for i in range(value.shape[0]):
        for j in range(value.shape[1]):
            small[i, j] = (value[i, j] / scales[i // 40, j // 24]).to(torch.float8_e4m3fn)
            expected[i, j] = small[i, j].float() * scales[i // 40, j // 24]
    weights |= {name: small, f"{name}_scale_inv": scales}
    save_file(weights, tmp_path / "m" / "model.safetensors")
    settings = json.loads((folder / "config.json").read_text())
    settings["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [40, 24]}
    (tmp_path / "m" / "config.json").write_text(json.dumps(settings))
    model = from_hf(tmp_path / "m")
    assert torch.equal(model.layers["0"].attention.wq.weight, expected)
    assert torch.equal(model.layers["1"].attention.wq.weight, weights["model.layers.1.self_attn.q_proj.weight"])
    source = Folder(tmp_path / "m", block=(40, 24))
    assert torch.equal(source.read(name, ((33, 59), (20, 50))), expected[33:59, 20:50])  # a share that cuts blocks


@pytest.mark.slow
def test_two_processes_read_and_write_their_shares(folders: Any, tmp_path: Path) -> None:
    script, cases = Path(__file__).with_name("shared_out_script.py"), ["llama", "gpt2", "qwen3-tied", "deepseek-v3"]
    ranks = warm.run_ranks(2, script, tmp_path, *(folders[case][0] for case in cases), timeout=600)
    for done in ranks:
        assert done.returncode == 0, done.stderr
        assert {f"passed {name}" for name in ("pictures", *cases)} <= set(done.stdout.splitlines()), done.stdout
    for case in cases:
        written, original = from_hf(tmp_path / case), from_hf(folders[case][0])
        for name, parameter in original.named_parameters():
            assert torch.equal(parameter, written.get_parameter(name)), name


@pytest.mark.parametrize("case", ["qwen3-moe", "deepseek-v3"])
def test_experts_lie_one_by_one_in_a_file_or_all_in_one_tensor(case: str, folders: Any, tmp_path: Path) -> None:
    folder, _ = folders[case]
    hf_model(case).save_pretrained(tmp_path / "fused", save_original_format=False)
    names = [set(load_file(where / "model.safetensors")) for where in (folder, tmp_path / "fused")]
    assert "model.layers.1.mlp.experts.7.up_proj.weight" in names[0] - names[1]
    assert "model.layers.1.mlp.experts.gate_up_proj" in names[1] - names[0]
    apart, fused = from_hf(folder).state_dict(), from_hf(tmp_path / "fused").state_dict()
    assert all(torch.equal(value, fused[name]) for name, value in apart.items())
    to_hf(from_hf(tmp_path / "fused"), tmp_path / "out")
    assert set(load_file(tmp_path / "out" / "model.safetensors")) == names[0]


def test_experts_that_hugging_face_does_not_know_are_not_written(tmp_path: Path) -> None:
    model = build_model("deepseek-v3-16b", vocab_size=64, dim=32, layers=2, hidden=32, kv_lora_rank=16)
    with pytest.raises(ValueError, match=r"moe\.score is 'softmax'; the family at Hugging Face knows only 'sigmoid'"):
        to_hf(model, tmp_path / "out")


@pytest.mark.parametrize("family", ["qwen3-moe", "llama4"])
def test_a_bias_that_hugging_face_does_not_know_is_written_only_if_it_is_zero(family: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    small: dict[str, Any] = {"vocab_size": 64, "dim": 32, "layers": 2, "heads": 4, "kv_heads": 2, "hidden": 32}
    model = build_model(f"{family}-debug", **small)
    initialize(model, 0)
    to_hf(model, tmp_path / "unbiased")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "unbiased")
    torch.testing.assert_close(model(tokens() % 64), theirs(tokens() % 64).logits, atol=1e-5, rtol=1e-4)
    (name, bias), *_ = ((name, b) for name, b in model.named_buffers() if name.endswith("expert_bias"))
    bias[0] = 0.1
    with pytest.raises(
        ValueError, match=rf"{re.escape(name)} balances .*keep the checkpoint, or train with overrides\.moe"
    ):
        to_hf(model, tmp_path / "biased")
    assert not (tmp_path / "biased").exists()


def test_a_model_that_is_balanced_otherwise_is_filled_all_the_same(folders: Any) -> None:
    folder, _ = folders["deepseek-v3"]
    read = from_hf(folder)
    config = read.config
    model = type(read)(
        dataclasses.replace(config, moe=dataclasses.replace(config.moe, bias_rate=0.1, balance_loss=1e-3))
    )
    from_hf(folder, model)
    assert model.config.moe.bias_rate == 0.1
    torch.testing.assert_close(model(tokens()), read(tokens()), rtol=0, atol=0)


def test_layers_that_predict_further_tokens_are_left_where_they_are(folders: Any, tmp_path: Path) -> None:
    folder, _ = folders["deepseek-v3"]
    shutil.copytree(folder, tmp_path / "more")
    file, config = tmp_path / "more" / "model.safetensors", tmp_path / "more" / "config.json"
    save_file(load_file(file) | {"model.layers.3.eh_proj.weight": torch.ones(64, 128)}, file)
    with pytest.raises(ValueError, match=r"no place for: model\.layers\.3\.eh_proj\.weight"):
        from_hf(tmp_path / "more")
    config.write_text(json.dumps(json.loads(config.read_text()) | {"num_nextn_predict_layers": 1}))
    torch.testing.assert_close(from_hf(tmp_path / "more")(tokens()), from_hf(folder)(tokens()), rtol=0, atol=0)
