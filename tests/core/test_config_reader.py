"""Reading of JSON configurations: null counts as missing."""

from eqx_decoders.core.config_reader import Fields
from eqx_decoders.errors import ConversionError
from tests.errors import refused


def test_supplies_a_value_for_missing_keys_and_null():
    fields = Fields({"null": None, "equal": 2, "different": 3})
    for key in ("null", "equal", "missing"):
        fields.supply(key, 2)
        assert fields.integer(key) == 2
    with refused(ConversionError, "different=3", "2"):
        fields.supply("different", 2)


def test_number_of_layers_is_optional_and_bounded():
    fields = Fields({"null": None, "large": 1025})
    assert fields.layers("null", None) is None and fields.layers("missing", 2) == 2
    for key in ("null", "large"):
        with refused(ConversionError, key):
            fields.layers(key)
