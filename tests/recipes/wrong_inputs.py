"""The table of `test_wrong_inputs.py`: what a user may get wrong, and the line that answers it.

A case is one change to a command that would train (or evaluate, or merge). The files that it names are made by
`wrong_files.make_folder`.
"""

from typing import NamedTuple


class Case(NamedTuple):
    """`script` with `arguments` put behind the command that works ends with `error: ` and `line` (a prefix)."""

    name: str
    arguments: str
    line: str
    script: str = "grpo"
    without: str | None = None  # a package that is taken for not installed


_GOOD = (
    "--dataset data.jsonl --held_out 20 --use_peft true --lora_target_modules all-linear --bf16 false --use_cpu true "
    "--max_completion_length 4 --max_steps 1 --report_to none --output_dir out --save_strategy no "
)
GOOD = {
    "grpo": f"--model_name_or_path base {_GOOD}--num_generations 8 --per_device_train_batch_size 8",
    "t_spmo": f"--model_name_or_path base {_GOOD}--num_generations 8 --per_device_train_batch_size 8",
    "a_star_po": f"--model_name_or_path base {_GOOD}--per_device_train_batch_size 8 --value_cache values",
    "evaluate": "--model base --dataset data.jsonl --max_new_tokens 4",
    "merge": "--adapter adapter --output merged",
}

ARGUMENTS = [
    Case(
        "unknown-option",
        "--learning_rat 1",
        "command line: unknown key '--learning_rat'; did you mean '--learning_rate'?",
    ),
    Case("unknown-option-equals", "--learning_rat=1", "command line: unknown key '--learning_rat'; did you mean"),
    Case(
        "unknown-key",
        "--config unknown_key.yaml",
        "unknown_key.yaml: unknown key 'num_generation'; did you mean 'num_generations'?",
    ),
    Case(
        "unknown-key-equals",
        "--config=unknown_key.yaml",
        "unknown_key.yaml: unknown key 'num_generation'; did you mean",
    ),
    Case(
        "config-missing",
        "--config bad_yam.yaml",
        "--config bad_yam.yaml: No such file or directory; did you mean 'bad_yaml.yaml'?",
    ),
    Case("config-folder", "--config base", "--config base: Is a directory"),
    Case("config-no-value", "--config", "command line: --config needs a file"),
    Case("config-twice", "--config good.yaml --config good.yaml", "command line: --config is given twice"),
    Case("config-bad-yaml", "--config bad_yaml.yaml", "--config bad_yaml.yaml, line 2, column 11: no YAML"),
    Case("config-no-mapping", "--config list.yaml", "--config list.yaml must hold `key: value` lines"),
    Case("config-binary", "--config base/model.safetensors", "--config base/model.safetensors"),
    Case("config-env", "--config env.yaml", "env.yaml: env=['A'] must hold `NAME: value` lines"),
    Case(
        "yaml-list-for-number",
        "--config list_for_number.yaml",
        "list_for_number.yaml: learning_rate=[0.1] is not a number",
    ),
    Case(
        "yaml-text-for-number",
        "--config text_for_number.yaml",
        "text_for_number.yaml: max_steps='ten' is not a whole number",
    ),
    Case("yaml-fraction-for-count", "--config fraction.yaml", "fraction.yaml: max_steps=1.5 is not a whole number"),
    Case(
        "yaml-true-for-count",
        "--config true_for_count.yaml",
        "true_for_count.yaml: held_out=True is not a whole number",
    ),
    Case(
        "yaml-number-for-switch",
        "--config number_for_switch.yaml",
        "number_for_switch.yaml: chat=2 is neither true nor false",
    ),
    Case(
        "yaml-list-for-name",
        "--config list_for_name.yaml",
        "list_for_name.yaml: dataset=['a', 'b'] must be one word or text",
    ),
    Case("yaml-choice", "--config choice.yaml", "choice.yaml: dtype='float12' is none of"),
    Case("text-for-number", "--max_steps ten", "command line: --max_steps: invalid int value: 'ten'"),
    Case("text-for-switch", "--chat perhaps", "command line: --chat: Truthy value expected: got perhaps"),
    Case("choice", "--dtype float12", "command line: --dtype: invalid choice: 'float12'"),
    Case("option-without-value", "--output_dir", "command line: --output_dir: expected one argument"),
    Case("stray-word", "--max_steps 1 2", "command line: '2' belongs to no option"),
    Case("stage", "--stage both", "command line: --stage: invalid choice: 'both'", "a_star_po"),
]
TRAINING = [
    Case(
        "batch-size",
        "--per_device_train_batch_size 3",
        "generation_batch_size (3) must be divisible by num_generations (8). A generation batch has per_device_train_batch_size=3",
    ),
    Case("batch-size-0", "--per_device_train_batch_size 0", "per_device_train_batch_size=0 must be at least 1"),
    Case("one-generation", "--num_generations 1", "GRPO requires at least 2 generations per prompt"),
    Case("no-generation", "--num_generations 0", "num_generations=0 must be at least 1"),
    Case("negative-completion", "--max_completion_length -1", "max_completion_length=-1 must be at least 1"),
    Case("max-steps-0", "--max_steps 0", "max_steps=0 trains nothing"),
    Case("max-steps-negative", "--max_steps -5", "max_steps=-5 trains nothing"),
    Case("epochs-0", "--max_steps -1 --num_train_epochs 0", "num_train_epochs=0.0 trains nothing"),
    Case("learning-rate", "--learning_rate -0.1", "learning_rate=-0.1 is negative"),
    Case("temperature", "--temperature 0", "temperature=0.0 must be positive"),
    Case("accumulation-0", "--gradient_accumulation_steps 0", "gradient_accumulation_steps=0 must be at least 1"),
    Case("resume-broken", "--resume_from_checkpoint taken/checkpoint-5", "checkpoint taken/checkpoint-5 is not whole"),
    Case("merge-no-base", "--adapter no_base", "base is not set; name a folder or a model on the Hub", "merge"),
    Case("merge-base", "--base ./bse", "base='./bse': no such folder here", "merge"),
    Case(
        "bf16",
        "--bf16 true --use_cpu false --fp16 true",
        "Your setup doesn't support bf16/gpu. You need to assign use_cpu if you want to train the model on CPU. In the recipe: use_cpu: true and bf16: false.",
    ),
    Case(
        "prefix-sharing",
        "--prefix_sharing on",
        "prefix_sharing='on' is not known; use one of auto, off, cascade, two_part, flex",
    ),
    Case("flex-on-cpu", "--prefix_sharing flex", "prefix_sharing='flex' needs a CUDA device, and this run is on cpu"),
    Case("token-selection", "--token_selection sgrpo", "token_selection='sgrpo'"),
    Case(
        "token-rate",
        "--token_selection uniform --token_selection_rate 1.5",
        "token_selection_rate=1.5 is outside (0, 1]",
    ),
    Case("fsdp-gather", "--fsdp_gather sometimes", "fsdp_gather='sometimes'"),
    Case(
        "report-to",
        "--report_to wandb",
        "report_to='wandb' needs a package that is not installed: pip install wandb",
        without="wandb",
    ),
    Case("report-to-unknown", "--report_to wndb", "report_to: wndb is not supported, only azure_ml, "),
    Case(
        "4bit-without-bitsandbytes",
        "--load_in_4bit true",
        "load_in_4bit: true needs bitsandbytes, which is not installed",
        without="bitsandbytes",
    ),
    Case(
        "4bit-full",
        "--load_in_4bit true --use_peft false",
        "load_in_4bit: true trains no weight of the base; add use_peft: true",
    ),
    Case(
        "4bit-and-8bit",
        "--load_in_4bit true --load_in_8bit true",
        "You can't use 8 bit and 4 bit precision at the same time",
    ),
    Case("lora-targets", "--lora_target_modules q_prj k_prj", "lora_target_modules: Target modules {"),
    Case(
        "lora-target",
        "--lora_target_modules q_prj",
        "lora_target_modules: Target modules {'q_prj'} not found in the base model. Please check the target modules and try again. Linear layers of this model: down_proj",
    ),
    Case("lora-rank", "--lora_r 0", "lora_r=0 must be at least 1"),
    Case("lora-dropout", "--lora_dropout 1.5", "lora_dropout=1.5 is outside [0, 1)"),
    Case("attention", "--attn_implementation flash", "model_name_or_path='base' cannot be built"),
    Case(
        "resume-nothing",
        "--resume_from_checkpoint true",
        "resume_from_checkpoint=true: out holds no complete checkpoint",
    ),
    Case(
        "resume-missing",
        "--resume_from_checkpoint out/checkpoint-7",
        "resume_from_checkpoint=out/checkpoint-7: no such folder",
    ),
    Case("output-taken", "--output_dir taken", "output_dir=taken holds another run (checkpoint-5)"),
    Case("output-is-a-file", "--output_dir data.jsonl", "output_dir=data.jsonl cannot be written: File exists"),
    Case("beta", "--beta 0", "beta=0.0 must be positive", "a_star_po"),
    Case("value-samples", "--value_samples 0", "value_samples=0", "a_star_po"),
    Case(
        "t-spmo-rewards", "--rewards tags", "unknown reward 'tags'; known: exact_answer, tag_format, graded", "t_spmo"
    ),
]
SCRIPT = [
    Case("reward", "--rewards exact", "unknown reward 'exact'; known: exact_answer, tag_format, graded"),
    Case("reward-in-yaml", "--config reward.yaml", "unknown reward 'exact'"),
    Case("no-rewards", "--config no_rewards.yaml", "rewards is empty; set rewards: [exact_answer]"),
    Case(
        "answer-format",
        "--answer_format latex",
        "answer_format='latex' is not one of auto, hash, tags, boxed, last_number",
    ),
    Case("template", "--prompt_template Solve", "prompt_template='Solve' has no {question} in it"),
    Case("held-out-negative", "--held_out -1", "held_out=-1 must be at least 0"),
    Case("held-out-all", "--held_out 55", "held_out=55 of 55 different questions leaves nothing on one side"),
    Case("eval-problems-0", "--eval_problems 0", "eval_problems=0 must be at least 1"),
    Case("eval-problems-negative", "--eval_problems -3", "eval_problems=-3 must be at least 1"),
    Case("accuracy-steps", "--accuracy_steps -1", "accuracy_steps=-1 must be at least 0"),
    Case("accuracy-samples", "--accuracy_samples -1", "accuracy_samples=-1 must be at least 0"),
    Case("accuracy-batch-size", "--accuracy_batch_size 0", "accuracy_batch_size=0 must be at least 1"),
]
MODELS = [
    Case("no-model", "--config no_model.yaml", "model_name_or_path is not set"),
    Case(
        "model-misspelt",
        "--model_name_or_path ./bse",
        "model_name_or_path='./bse': no such folder here, and no Hub id (owner/name); did you mean 'base'?",
    ),
    Case(
        "model-misspelt-hub-like",
        "--model_name_or_path bse",
        "model_name_or_path='bse' is not a folder here and cannot be loaded: ",
    ),
    Case(
        "model-path", "--model_name_or_path no/such/folder", "model_name_or_path='no/such/folder': no such folder here"
    ),
    Case(
        "model-file",
        "--model_name_or_path base/model.safetensors",
        "model_name_or_path='base/model.safetensors' is a file",
    ),
    Case(
        "model-empty-folder",
        "--model_name_or_path empty",
        "model_name_or_path='empty' is a folder without config.json, so no model",
    ),
    Case(
        "model-parent",
        "--model_name_or_path parent",
        "model_name_or_path='parent' is a folder without config.json, so no model; did you mean 'parent/base'?",
    ),
    Case(
        "model-is-adapter", "--model_name_or_path adapter", "model_name_or_path='adapter' is an adapter, not a model"
    ),
    Case("model-broken-config", "--model_name_or_path broken", "model_name_or_path='broken' cannot be loaded"),
    Case("no-tokenizer", "--model_name_or_path no_tokenizer", "model_name_or_path='no_tokenizer' has no tokenizer"),
    Case(
        "no-chat-template",
        "--model_name_or_path no_template",
        "model_name_or_path='no_template' has no chat template; set chat: false",
    ),
]
DATA = [
    Case(
        "file-misspelt",
        "--dataset mine.jsonl",
        "dataset 'mine.jsonl' is neither a file or folder here nor a Hub id (owner/name)",
    ),
    Case(
        "file-nearly",
        "--dataset dta.jsonl",
        "dataset 'dta.jsonl' is neither a file or folder here nor a Hub id (owner/name); did you mean 'data.jsonl'?",
    ),
    Case(
        "dataset-path",
        "--dataset no/such/data",
        "dataset 'no/such/data' is neither a file or folder here nor a Hub id",
    ),
    Case(
        "dataset-hub",
        "--dataset nobody/nothing",
        "dataset 'nobody/nothing' (split 'train') is not a file or folder here and cannot be loaded from the Hub",
    ),
    Case(
        "kind-of-file",
        "--dataset data.txt",
        "data.txt is not a file of a known kind: .jsonl, .json, .csv, .tsv, .parquet",
    ),
    Case(
        "bad-line", "--dataset bad_line.jsonl", "bad_line.jsonl, line 3: no JSON: Expecting ',' delimiter (column 20)"
    ),
    Case(
        "no-object", "--dataset no_object.jsonl", "no_object.jsonl, line 2: a row must be an object, {...}, not [1, 2]"
    ),
    Case("missing-field", "--dataset missing.jsonl", "missing.jsonl, line 2: the field 'answer' is missing"),
    Case("null-field", "--dataset null.jsonl", "null.jsonl, line 2: the field 'answer' is empty"),
    Case(
        "empty-question",
        "--dataset empty_question.jsonl",
        "empty_question.jsonl, line 1: the field 'problem' is empty",
    ),
    Case("question-number", "--dataset number.jsonl", "number.jsonl, line 1: the field 'problem' must be text, not 5"),
    Case(
        "answer-list",
        "--dataset answer_list.jsonl",
        "answer_list.jsonl, line 1: the field 'answer' must be a number or text, not [5]",
    ),
    Case(
        "answer-nan", "--dataset nan.jsonl", "nan.jsonl, line 1: the gold answer of row 0 cannot be read as a number"
    ),
    Case(
        "answer-words",
        "--dataset words.jsonl",
        "words.jsonl, line 2: the gold answer of row 1 cannot be read as a number",
    ),
    Case("columns", "--dataset columns.jsonl", "'columns.jsonl' has columns a, b; known families have: "),
    Case("no-rows", "--dataset none.jsonl", "dataset 'none.jsonl' (split 'train') has no rows"),
    Case("bad-json", "--dataset bad.json", "bad.json, line 2: no JSON"),
    Case(
        "json-two-lists",
        "--dataset two_lists.json",
        'two_lists.json must hold a list of rows, or an object with one such list, e.g. {"data": [...]}',
    ),
    Case("json-row", "--dataset bad_row.json", "bad_row.json, data, row 1: a row must be an object"),
    Case(
        "json-null-in-data",
        "--dataset null_in_data.json",
        "null_in_data.json, data, row 1: the field 'answer' is empty",
    ),
    Case("json-number", "--dataset number.json", "number.json must hold a list of rows, not 3"),
    Case("not-utf8", "--dataset latin1.jsonl", "latin1.jsonl: it is not UTF-8 text"),
    Case("csv-fields", "--dataset fields.csv", "fields.csv, line 3: more fields than the header has columns (2)"),
    Case("csv-missing", "--dataset missing.csv", "missing.csv, line 3: the field 'answer' is empty"),
    Case("no-parquet", "--dataset no.parquet", "no.parquet: no parquet"),
    Case("parquet-null", "--dataset null.parquet", "null.parquet, row 1: the field 'answer' is empty"),
    Case(
        "folder-without-split", "--dataset parts --held_out 0 --eval_split dev", "parts is a folder without dev.jsonl"
    ),
    Case(
        "folder-without-data",
        "--dataset empty",
        "empty is a folder without train.jsonl (or .json, .csv, .tsv, .parquet): it has no data files at all",
    ),
    Case(
        "saved-without-split",
        "--dataset saved --held_out 0 --eval_split dev",
        "saved has no split 'dev'; it has train, test",
    ),
    Case(
        "file-without-held-out",
        "--held_out 0",
        "training and held-out problems are both 'data.jsonl', which has no splits; set held_out",
    ),
    Case(
        "same-split",
        "--dataset addition --held_out 0 --eval_split train",
        "training and held-out problems are both 'addition', split 'train'; set held_out",
    ),
    Case(
        "eval-dataset",
        "--held_out 0 --eval_dataset dta.jsonl",
        "dataset 'dta.jsonl' is neither a file or folder here nor a Hub id",
    ),
    Case(
        "all-held-out",
        "--held_out 0 --eval_dataset copy.jsonl",
        "all 55 problems of 'data.jsonl' are among the held-out ones",
    ),
    Case(
        "too-few-rows",
        "--held_out 54 --per_device_train_batch_size 16",
        "the training dataset has 1 rows, but one generation batch takes 2 different prompts",
    ),
]
OTHERS = [
    Case("evaluate-model", "--model ./bse", "model='./bse': no such folder here", "evaluate"),
    Case(
        "evaluate-adapter",
        "--adapter empty",
        "adapter='empty' is a folder without adapter_config.json, so no adapter",
        "evaluate",
    ),
    Case(
        "evaluate-adapter-missing",
        "--adapter nobody/nothing",
        "adapter='nobody/nothing' is not a folder here and cannot be loaded",
        "evaluate",
    ),
    Case("evaluate-tokens", "--max_new_tokens 0", "max_new_tokens=0 must be at least 1", "evaluate"),
    Case("evaluate-samples", "--samples -1", "samples=-1 must be at least 0", "evaluate"),
    Case("evaluate-batch", "--batch_size 0", "batch_size=0 must be at least 1", "evaluate"),
    Case("evaluate-top-p", "--top_p 2", "temperature=1.0 must be positive and top_p=2.0 in (0, 1]", "evaluate"),
    Case("evaluate-dtype", "--dtype bfloat", "command line: --dtype: invalid choice: 'bfloat'", "evaluate"),
    Case("evaluate-4bit", "--load_in_4bit true", "load_in_4bit: true needs bitsandbytes", "evaluate", "bitsandbytes"),
    Case("evaluate-data", "--dataset bad_line.jsonl", "bad_line.jsonl, line 3: no JSON", "evaluate"),
    Case("evaluate-split", "--dataset parts --eval_split dev", "parts is a folder without dev.jsonl", "evaluate"),
    Case(
        "merge-adapter",
        "--adapter empty",
        "adapter='empty' is a folder without adapter_config.json, so no adapter",
        "merge",
    ),
    Case(
        "merge-option", "--adaptr adapter", "command line: unknown key '--adaptr'; did you mean '--adapter'?", "merge"
    ),
]
TABLE = [*ARGUMENTS, *TRAINING, *SCRIPT, *MODELS, *DATA, *OTHERS]
