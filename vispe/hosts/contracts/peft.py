"""Names of peft on which vispe relies."""

from __future__ import annotations

from vispe.hosts.contracts.contract import Contract, Library

LIBRARY = Library(
    "peft",
    "peft",
    "0.21",
    (
        Contract(
            "peft.peft_model:PeftModel.save_pretrained", "it saves an adapter", positional="save_directory"
        ),
        Contract(
            "peft.peft_model:PeftModel.get_prompt",
            "it returns virtual tokens or a cache",
            positional="batch_size",
        ),
        Contract(
            "peft.peft_model:PeftModel.active_peft_config", "it is the configuration of the active adapter"
        ),
        Contract(
            "peft:PromptLearningConfig",
            "these attributes are the kind of an adapter, and its number of virtual tokens",
            keywords="num_virtual_tokens",
            attributes="is_prompt_learning",
        ),
        Contract(
            "peft.tuners.tuners_utils:BaseTuner.inject_adapter",
            "it selects the target modules",
            positional="model",
        ),
        Contract(
            "peft.tuners.tuners_utils:check_target_module_exists",
            "tuners import it by name and call it for each module",
            positional="config key",
        ),
    ),
)
