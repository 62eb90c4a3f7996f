"""The config that the settings ask for."""

import pytest

from dsx.errors import ModelError
from dsx.models.config import load_config
from dsx.settings.dsx_block import ModelSettings
from tests.models.tiny_families import tiny_config


def from_json(**config: object):
    return load_config(ModelSettings(config=config))


def test_json_becomes_the_familys_config() -> None:
    config = from_json(model_type="llama", hidden_size=64, num_attention_heads=4, rope_theta=5e5)
    assert config.model_type == "llama"
    assert config.hidden_size == 64
    assert config.rope_parameters["rope_theta"] == 5e5


def test_a_folder_gives_its_config(tmp_path) -> None:
    tiny_config("gemma2").save_pretrained(tmp_path)
    assert load_config(ModelSettings(path=str(tmp_path))).sliding_window == 4


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"model_type": "lama"}, "'lama'.*'llama'"),
        ({"model_type": "llama", "hiden_size": 64}, "'hiden_size'.*'hidden_size'"),
        ({"model_type": "gpt2", "n_layers": 2}, "'n_layers'.*'n_layer'"),
        ({"model_type": "llama", "hidden_size": "wide"}, "hidden_size"),
        ({"model_type": "llama", "hidden_size": 30, "num_attention_heads": 4}, "hidden size"),
    ],
)
def test_a_wrong_config_is_refused_with_the_nearest_name(config, said: str) -> None:
    with pytest.raises(ModelError, match=f"(?s){said}"):
        from_json(**config)


def test_a_path_without_a_config_is_refused(tmp_path) -> None:
    with pytest.raises(ModelError, match=r"(?s)dsx\.model\.path"):
        load_config(ModelSettings(path=str(tmp_path)))


def test_special_tokens_of_a_larger_vocabulary_are_left_out_without_a_word(caplog, capfd) -> None:
    config = from_json(model_type="gpt2", vocab_size=300, eos_token_id=7)
    assert (config.bos_token_id, config.eos_token_id) == (None, 7)
    assert from_json(model_type="gpt2").eos_token_id == 50256
    assert caplog.text + "".join(capfd.readouterr()) == ""
