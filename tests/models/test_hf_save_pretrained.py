"""transformers' ``save_pretrained()`` of a sharded model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.fsdp.towers import filled
from tests.ranks import on_processes, on_threads
from vescale_ray import fully_shard
from vescale_ray.state_dict import StateDictOptions, get_model_state_dict

transformers = pytest.importorskip("transformers")


def llama():
    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_key_value_heads=1, tie_word_embeddings=True))


@on_processes(2, timeout=180)
def test_save_pretrained_names_a_remedy_that_works(rank, world, tmp_path):
    model, alone = llama(), llama()
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    with pytest.raises(ValueError, match=r"save_pretrained\(\) of a sharded module needs whole tensors: .*get_model_state_dict"):
        model.save_pretrained(tmp_path)
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    model.save_pretrained(tmp_path, state_dict=state)
    dist.barrier()
    saved = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    for name, value in alone.state_dict().items():
        assert torch.equal(saved.state_dict()[name], value), name


@on_threads(2)
def test_adapters_are_saved_from_whole_tensors(rank, world, tmp_path):
    """peft takes the state dict as one of its other arguments."""
    peft = pytest.importorskip("peft")
    safetensors = pytest.importorskip("safetensors.torch")
    model = filled(peft.get_peft_model(torch.nn.Sequential(torch.nn.Linear(8, 8)), peft.LoraConfig(r=2, target_modules=["0"])), 0, 0.3)
    expected = {name: value.clone() for name, value in peft.get_peft_model_state_dict(model).items()}
    fully_shard(model)
    with pytest.raises(ValueError, match=r"save_pretrained\(\) of a sharded module needs whole tensors: .*get_model_state_dict"):
        model.save_pretrained(tmp_path)
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    model.save_pretrained(tmp_path / str(rank), state_dict=state)
    saved = safetensors.load_file(tmp_path / str(rank) / "adapter_model.safetensors")
    torch.testing.assert_close(saved, expected)


class Plain(torch.nn.Module):
    """A module with no ``save_pretrained()`` of its own."""

    def __init__(self):
        super().__init__()
        self.linear: Any = torch.nn.Linear(8, 8)

    def forward(self, x):
        return self.linear(x)


class Gathers(Plain):
    """A module whose ``save_pretrained()`` gathers the tensors itself."""

    def save_pretrained(self, folder, **options):
        state = {name: value.full_tensor() for name, value in self.state_dict().items()}
        torch.save(state, folder / f"{dist.get_rank()}.pt", **options)


class PassesOn(Plain):
    """A module that gives the arguments of ``save_pretrained()`` to another one."""

    def save_pretrained(self, folder, **options):
        self.linear.save_pretrained(folder, **options)


@on_threads(2)
def test_own_save_pretrained_that_gathers_is_called(rank, world, tmp_path):
    """A ``save_pretrained()`` that takes no ``state_dict`` is called, also with ``**kwargs``; one that passes them on is refused."""
    fully_shard(model := filled(Gathers()))
    model.save_pretrained(tmp_path)
    torch.testing.assert_close(torch.load(tmp_path / f"{rank}.pt"), dict(filled(Plain()).state_dict()))
    fully_shard(wrapper := PassesOn())
    with pytest.raises(ValueError, match=r"save_pretrained\(\) of a sharded module needs whole tensors"):
        wrapper.save_pretrained(tmp_path)


@on_threads(2)
def test_models_of_the_hub_are_saved_from_a_plain_copy(rank, world, tmp_path):
    """``PyTorchModelHubMixin`` takes no ``state_dict``: the error names a remedy, which works."""
    hub: Any = pytest.importorskip("huggingface_hub")

    class OnTheHub(Plain, hub.PyTorchModelHubMixin):  # type: ignore[name-defined,misc]
        pass

    fully_shard(model := filled(OnTheHub()))
    with pytest.raises(RuntimeError, match=r"for a save_pretrained\(\) without state_dict, load these into a model that is not sharded"):
        model.save_pretrained(tmp_path / str(rank))
    copied: Any = OnTheHub()
    copied.load_state_dict(get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)))
    copied.save_pretrained(tmp_path / str(rank))
    torch.testing.assert_close(OnTheHub.from_pretrained(tmp_path / str(rank)).state_dict(), filled(Plain()).state_dict())
