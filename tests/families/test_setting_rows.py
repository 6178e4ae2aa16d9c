"""Rows of a settings table: reading from keys, and writing from a configuration."""

import dataclasses

import eqx_decoders as ed
from eqx_decoders.core.config_reader import Fields
from eqx_decoders.families.moe import need_experts, sparse_layer_indices
from eqx_decoders.families.setting_rows import (
    ABSENT,
    Check,
    Defaults,
    Flag,
    Group,
    Integer,
    Number,
    Only,
    Renamed,
    Rule,
    Table,
    Unused,
    Word,
    public,
    read_all,
    sized,
    value_at,
    write_all,
)
from eqx_decoders.layers.mlp import MLPConfig
from tests.errors import refused
from tests.families.samples import decode, sample


TINY = ed.get_config("tiny")
MLP = MLPConfig(mlp_dim=6, activation="gelu")
ROWS = (
    Integer("width", "mlp_dim"),
    Word("act", "activation", "plain", known={"plain": "silu", "smooth": "gelu", "gelu": "gelu"}),
    Flag("use_bias", "bias", False),
    Number("drop", "dropout", 0.5, null=0.0),
)


def test_rows_are_read_and_written():
    fields = Fields({"width": 6, "act": "gelu", "drop": None})
    values = read_all(ROWS, fields)
    assert values == dict(mlp_dim=6, activation="gelu", bias=False, dropout=0.0)
    fields.finish()
    assert write_all(ROWS, MLP) == {"width": 6, "act": "smooth", "use_bias": False, "drop": 0.0}
    with refused(ed.ConversionError, "config.json", "width"):
        read_all(ROWS, Fields({}))
    with refused(ed.ConversionError, "act", "'relu'", "plain, smooth, gelu"):
        write_all(ROWS, dataclasses.replace(MLP, activation="relu"))


def test_paths_start_with_the_type_of_a_layer():
    assert (value_at(TINY, "attention.num_heads"), value_at(TINY, "mlp.mlp_dim"), value_at(TINY, "blocks.4.mlp")) == (
        4, 704, TINY.blocks[4].mlp,
    )  # fmt: skip
    with refused(ed.ConversionError, "DecoderConfig.blocks", "ExpertsConfig"):
        value_at(TINY, "experts.mlp_dim")
    with refused(ed.ConversionError, "DecoderConfig.mlp.router", "MLPConfig"):
        value_at(TINY, "mlp.router")


def test_paths_to_experts_skip_dense_layers():
    mixed = decode(sample("qwen3_moe", "mlp_only_layers", decoder_sparse_step=2))
    dense = dataclasses.replace(mixed, blocks=mixed.blocks[:1])
    assert (sparse_layer_indices(mixed), sparse_layer_indices(dense)) == ([1, 3], [])
    assert value_at(mixed, "experts") == mixed.blocks[1].mlp
    assert (value_at(mixed, "mlp.mlp_dim"), value_at(ed.get_config("mixtral-8x7b"), "mlp.mlp_dim")) == (40, 14_336)
    with refused(ed.ConversionError, "DecoderConfig.blocks", "ExpertsConfig"):
        value_at(dense, "experts")
    with refused(ed.ConfigError, "experts"):
        need_experts(dense)


def test_functions_may_replace_paths_and_defaults():
    rows = (
        Integer("heads", lambda config: len(config.blocks), 4, name="heads"),
        Integer("kv_heads", lambda config: ABSENT, lambda values: values["heads"] // 2, name="_kv_heads"),
        Rule("group", lambda fields, values: values["heads"] // values["_kv_heads"]),
        Integer("", None, 7, name="always"),
    )
    values = read_all(rows, Fields({"heads": 8}))
    assert values == dict(heads=8, _kv_heads=4, group=2, always=7)
    assert public(values) == dict(heads=8, group=2, always=7)
    assert write_all(rows, TINY) == {"heads": 5}


def test_twin_keys_have_one_value():
    row = Integer("num_experts", "mlp_dim", 3, twin="experts")
    assert [read_all((row,), Fields(keys))["mlp_dim"] for keys in ({}, {"experts": 4}, {"num_experts": 5})] == [3, 4, 5]
    assert row.write(MLP) == {"num_experts": 6, "experts": 6}
    with refused(ed.ConversionError, "experts=4", "num_experts=5"):
        read_all((row,), Fields({"experts": 4, "num_experts": 5}))


def test_only_accepts_one_value():
    rows = (Integer("a", "mlp_dim", 2), Only("b", lambda values: values["mlp_dim"], written=False), Only("c", 1.5, 2))
    assert read_all(rows, Fields({"a": 3, "b": 3, "c": 2})) == dict(mlp_dim=3)
    with refused(ed.ConversionError, "b=2", 3):
        read_all(rows, Fields({"a": 3, "b": 2}))
    assert Only("c", 1.5, 2, written=True).write(MLP) == {"c": 1.5}
    assert Only("d", written=True).write(MLP) == {"d": None}
    assert Only("c", 1.5).write(MLP) == {}


def test_renamed_default_and_unused_keys():
    rows = (Renamed({"old": "a"}), Defaults({"a": 1, "b": 2}), Unused("c d", "nothing reads them"), Integer("a", "x"))
    fields = Fields({"old": 5, "b": None, "c": "?"})
    assert read_all(rows, fields) == dict(x=5)
    assert fields.content == {"a": 5, "b": None}
    fields.finish()


def test_errors_of_checks_contain_the_values():
    rows = (Integer("a", "x"), Check(lambda values: values["x"] < 4, "a={x} must be less than 4."))
    assert read_all(rows, Fields({"a": 3})) == dict(x=3)
    with refused(ed.ConversionError, "config.json", "a=4"):
        read_all(rows, Fields({"a": 4}))


def test_groups_build_one_value():
    group = Group(
        "mlp", sized(MLPConfig, dataclasses.replace), ROWS, path="mlp", uses=("_gated",),
        when=lambda values: values["_gated"] is not None, layer="mlp",
    )  # fmt: skip
    first = Rule("_gated", lambda fields, values: fields.take("gated", None))
    assert read_all((first, group), Fields({"gated": False, "width": 6}))["mlp"].gated is False
    assert read_all((first, group), Fields({})) == dict(_gated=None, mlp=None)
    assert group.write(TINY)["width"] == 704
    assert dataclasses.replace(group, layer="experts").write(TINY) == {}
    with refused(ed.ConversionError, "config.json", "MLPConfig.activation"):
        made = dataclasses.replace(group, make=lambda **values: MLPConfig(mlp_dim=1, activation="none"))
        read_all((first, made), Fields({"gated": True, "width": 6}))
    with refused(ed.ConversionError, "DecoderConfig.media=None"):
        dataclasses.replace(group, path="media", layer=None).write(TINY)


def test_tables_are_nested_objects():
    group = Group("mlp", MLPConfig, ROWS, path="blocks.0.mlp")
    table = Table("mlp_config", (group,), model_type="plain", what="the MLP", ignored={"seed": "of new weights"})
    fields = Fields({"mlp_config": {"width": 6, "drop": None, "seed": 1, "model_type": "plain"}})
    assert read_all((table,), fields) == dict(mlp=MLPConfig(mlp_dim=6))
    assert fields.ignored({}, {}) == {"mlp_config": {"seed": 1}}
    assert table.write(TINY)["mlp_config"]["model_type"] == "plain"
    with refused(ed.ConversionError, "mlp_config", "the MLP"):
        read_all((table,), Fields({}))
    with refused(ed.ConversionError, "config.json", "mlp_config", "size"):
        read_all((table,), Fields({"mlp_config": {"width": 6, "size": 1}}))
    optional = dataclasses.replace(table, what="", settings=(dataclasses.replace(group, path="media"),))
    assert read_all((optional,), Fields({})) == dict(mlp=None)
    assert optional.write(TINY) == {"mlp_config": None}
