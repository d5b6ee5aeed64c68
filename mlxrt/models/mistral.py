"""Mistral 7B and its kin: Llama with a sliding window on every layer where the config gives one."""

from dataclasses import dataclass

from .config import ModelConfig
from .llama import Llama


@dataclass(frozen=True)
class MistralConfig(ModelConfig):
    def windows_without_types(self, raw):
        return (self.sliding_window,) * self.num_hidden_layers


class Mistral(Llama):
    Config = MistralConfig
