"""Conversations in every format, each piece with its tag, written out by hand."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Sample:
    """A prompt in pieces.

    Attributes:
        name: For the test's id.
        family: Which tokenizer of `chats.TOKENS` reads it.
        pieces: Text and tag; "current delim" is short for "current|text|delim".
        template: Markers that the chat template holds, where they are no tokens.
    """

    name: str
    family: str
    pieces: list[tuple[str, str]]
    template: str = ""

    @property
    def text(self) -> str:
        return "".join(text for text, _ in self.pieces)


def spell(short: str) -> str:
    """Full name of a tag: "older delim" is "older|text|delim"."""
    parts = short.split()
    return short if len(parts) == 1 else "|".join([parts[0], *([] if len(parts) == 3 else ["text"]), *parts[1:]])


SAMPLES = [
    Sample(
        "qwen3-five-turns",
        "qwen3",
        [
            ("<|im_start|>system\n", "older delim"),
            ("Be brief.", "older inst"),
            ("<|im_end|>\n", "older delim"),
            ("<|im_start|>user\n", "older delim"),
            ("One", "older user"),
            ("<|im_end|>\n<|im_start|>assistant\n", "older delim"),
            ("1", "older assistant"),
            ("<|im_end|>\n", "older delim"),
            ("<|im_start|>user\n", "older delim"),
            ("Two", "older user"),
            ("<|im_end|>\n<|im_start|>assistant\n", "older delim"),
            ("2", "older assistant"),
            ("<|im_end|>\n", "older delim"),
            ("<|im_start|>user\n", "turn_m2 delim"),
            ("Sky?", "turn_m2 user"),
            ("<|im_end|>\n<|im_start|>assistant\n", "turn_m2 delim"),
            ("I look.\n", "turn_m2 assistant"),
            ("<tool_call>\n", "turn_m2 delim"),
            ('{"name": "sky", "arguments": {"at": "Bonn"}}\n', "turn_m2 tool_call"),
            ("</tool_call><|im_end|>\n", "turn_m2 delim"),
            # Results come as a user's message, and begin no turn.
            ("<|im_start|>user\n<tool_response>\n", "turn_m2 delim"),
            ("grey\n", "turn_m2 obs"),
            ("</tool_response>\n<tool_response>\n", "turn_m2 delim"),
            ("rain\n", "turn_m2 obs"),
            ("</tool_response><|im_end|>\n<|im_start|>assistant\n", "turn_m2 delim"),
            ("Rain.", "turn_m2 assistant"),
            ("<|im_end|>\n", "turn_m2 delim"),
            ("<|im_start|>user\n", "turn_m1 delim"),
            ("Ah", "turn_m1 user"),
            ("<|im_end|>\n<|im_start|>assistant\n", "turn_m1 delim"),
            ("Yes", "turn_m1 assistant"),
            ("<|im_end|>\n", "turn_m1 delim"),
            ("<|im_start|>user\n", "current delim"),
            ("Why?", "current user"),
            ("<|im_end|>\n<|im_start|>assistant\n<think>\n", "current delim"),
            ("Clouds.\n", "current reasoning"),
            ("</think>\n\n", "current delim"),
            ("Water.", "current assistant"),
            ("<|im_end|>\n", "current delim"),
        ],
    ),
    Sample(
        "qwen3-tools-and-typed-markers",
        "qwen3",
        [
            ("<|im_start|>system\n", "older delim"),
            # The prompt explains calls with their own markers.
            (
                "# Tools\n\nYou may call one or more functions to assist with the user query.\n\nYou are provided with "
                "function signatures within <tools></tools> XML tags:\n<tools>\n"
                '{"type": "function", "function": {"name": "sky", "parameters": {}}}\n</tools>\n\n'
                "For each function call, return a json object with function name and arguments within "
                "<tool_call></tool_call> XML tags:\n<tool_call>\n"
                '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>',
                "older inst",
            ),
            ("<|im_end|>\n", "older delim"),
            ("<|im_start|>user\n", "current delim"),
            ("What do <think> and <tool_call> or a <tool_response> mean?", "current user"),
            ("<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n", "current delim"),
        ],
    ),
    Sample(
        "llama3.1-json-call",
        "llama3",
        [
            ("<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\n", "older delim"),
            ("Cutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024\n\nBe brief.", "older inst"),
            ("<|eot_id|>", "older delim"),
            ("<|start_header_id|>user<|end_header_id|>\n\n", "turn_m1 delim"),
            ("Sky?", "turn_m1 user"),
            ("<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n", "turn_m1 delim"),
            ('{"name": "sky", "parameters": {"at": "Bonn"}}', "turn_m1 tool_call"),
            ("<|eot_id|><|start_header_id|>ipython<|end_header_id|>\n\n", "turn_m1 delim"),
            ('"grey"', "turn_m1 obs"),
            ("<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n", "turn_m1 delim"),
            # Braces alone make no call.
            ('{"sky": "grey"}', "turn_m1 assistant"),
            ("<|eot_id|>", "turn_m1 delim"),
            ("<|start_header_id|>user<|end_header_id|>\n\n", "current delim"),
            ('{"name": "Ann"}', "current user"),
            ("<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n", "current delim"),
        ],
    ),
    Sample(
        "llama3.1-python-tag",
        "llama3",
        [
            ("<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\n", "older delim"),
            (
                "Environment: ipython\nTools: search\n\n"
                "Cutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024\n\n",
                "older inst",
            ),
            ("<|eot_id|>", "older delim"),
            ("<|start_header_id|>user<|end_header_id|>\n\n", "current delim"),
            ("Sky?", "current user"),
            ("<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n<|python_tag|>", "current delim"),
            ('search.call(q="sky")', "current tool_call"),
            ("<|eom_id|><|start_header_id|>ipython<|end_header_id|>\n\n", "current delim"),
            ('"grey"', "current obs"),
            ("<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n", "current delim"),
        ],
    ),
    Sample(
        "gemma3",
        "gemma3",
        [
            ("<bos>", "older delim"),
            ("<start_of_turn>user\n", "turn_m1 delim"),
            # There is no system role: what the template puts before the first question counts to it.
            ("Be brief.\n\nHi", "turn_m1 user"),
            ("<end_of_turn>\n<start_of_turn>model\n", "turn_m1 delim"),
            ("Ho", "turn_m1 assistant"),
            ("<end_of_turn>\n", "turn_m1 delim"),
            ("<start_of_turn>user\n", "current delim"),
            ("<start_of_image>", "current image user"),
            ("What?", "current user"),
            ("<end_of_turn>\n<start_of_turn>model\n", "current delim"),
        ],
    ),
    Sample(
        "gpt-oss",
        "gptoss",
        [
            ("<|start|>system<|message|>", "older delim"),
            ("You are ChatGPT.", "older inst"),
            ("<|end|>", "older delim"),
            ("<|start|>developer<|message|>", "older delim"),
            ("# Instructions\n\nBe brief.\n\n# Tools\n\n## functions\n\n", "older inst"),
            ("namespace functions {\n\n// Looks up.\ntype sky = () => any;\n\n} // namespace functions", "older inst"),
            ("<|end|>", "older delim"),
            ("<|start|>user<|message|>", "turn_m1 delim"),
            ("Hi", "turn_m1 user"),
            ("<|end|><|start|>assistant<|channel|>final<|message|>", "turn_m1 delim"),
            ("Ho", "turn_m1 assistant"),
            ("<|end|>", "turn_m1 delim"),
            ("<|start|>user<|message|>", "current delim"),
            ("Sky?", "current user"),
            ("<|end|><|start|>assistant<|channel|>analysis<|message|>", "current delim"),
            ("Look up.", "current reasoning"),
            ("<|end|><|start|>assistant to=functions.sky<|channel|>commentary json<|message|>", "current delim"),
            ('{"at": "Bonn"}', "current tool_call"),
            ("<|call|><|start|>functions.sky to=assistant<|channel|>commentary<|message|>", "current delim"),
            ('"grey"', "current obs"),
            ("<|end|><|start|>assistant", "current delim"),
        ],
    ),
    Sample(
        "glm4.5",
        "glm4moe",
        [
            ("[gMASK]<sop><|system|>\n", "older delim"),
            ("Be brief.", "older inst"),
            ("<|user|>\n", "turn_m1 delim"),
            ("Hi", "turn_m1 user"),
            ("<|assistant|>\n<think></think>\n", "turn_m1 delim"),
            ("Ho", "turn_m1 assistant"),
            ("<|user|>\n", "current delim"),
            ("Sky?", "current user"),
            ("<|assistant|>\n<think>", "current delim"),
            ("Look", "current reasoning"),
            ("</think>\n<tool_call>", "current delim"),
            ("sky\n<arg_key>at</arg_key>\n<arg_value>Bonn</arg_value>\n", "current tool_call"),
            ("</tool_call><|observation|>\n<tool_response>\n", "current delim"),
            ("grey\n", "current obs"),
            ("</tool_response><|assistant|>", "current delim"),
        ],
    ),
    Sample(
        "mistral-v3",
        "mistral",
        [
            ("<s>", "older delim"),
            ("[AVAILABLE_TOOLS]", "older delim"),
            (' [{"name": "sky"}]', "older inst"),
            ("[/AVAILABLE_TOOLS]", "older delim"),
            ("[INST]", "turn_m1 delim"),
            (" Sky?", "turn_m1 user"),
            ("[/INST][TOOL_CALLS]", "turn_m1 delim"),
            (' [{"name": "sky"}]', "turn_m1 tool_call"),
            ("</s>[TOOL_RESULTS]", "turn_m1 delim"),
            (' {"content": "grey"}', "turn_m1 obs"),
            ("[/TOOL_RESULTS]", "turn_m1 delim"),
            (" Grey.", "turn_m1 assistant"),
            ("</s>", "turn_m1 delim"),
            ("[INST]", "current delim"),
            (" Ah", "current user"),
            ("[/INST]", "current delim"),
        ],
    ),
    Sample(
        "mistral-v13",
        "mistral",
        [
            ("<s>[SYSTEM_PROMPT]", "older delim"),
            ("Be brief.", "older inst"),
            ("[/SYSTEM_PROMPT]", "older delim"),
            ("[INST]", "current delim"),
            ("See", "current user"),
            ("[IMG][IMG][IMG_BREAK][IMG][IMG][IMG_END]", "current image user"),
            ("[/INST][THINK]", "current delim"),
            ("Hm", "current reasoning"),
            ("[/THINK][TOOL_CALLS]", "current delim"),
            ("f", "current tool_call"),
            ("[ARGS]", "current delim"),
            ("{}", "current tool_call"),
            ("[TOOL_CALLS]", "current delim"),
            ("g", "current tool_call"),
            ("</s>", "current delim"),
        ],
    ),
    Sample(
        "falcon3-markers-as-text",
        "falcon3",
        [
            ("<|system|>\n", "older delim"),
            ("Be brief.\n", "older inst"),
            ("<|user|>\n", "turn_m1 delim"),
            ("Is <| a pipe?\n", "turn_m1 user"),
            ("<|assistant|>\n", "turn_m1 delim"),
            ("Yes", "turn_m1 assistant"),
            ("<|endoftext|>\n", "turn_m1 delim"),
            ("<|user|>\n", "current delim"),
            ("Ah\n", "current user"),
            ("<|assistant|>\n", "current delim"),
        ],
        "<|user|><|assistant|>",
    ),
    Sample(
        "phi3.5",
        "phi3_5",
        [
            ("<|system|>\n", "older delim"),
            ("Be brief.", "older inst"),
            ("<|end|>\n", "older delim"),
            ("<|user|>\n", "turn_m1 delim"),
            ("Hi", "turn_m1 user"),
            ("<|end|>\n<|assistant|>\n", "turn_m1 delim"),
            ("Ho", "turn_m1 assistant"),
            ("<|end|>\n", "turn_m1 delim"),
            ("<|user|>\n", "current delim"),
            ("Oh", "current user"),
            ("<|end|>\n<|assistant|>\n", "current delim"),
        ],
    ),
    Sample(
        "deepseek-v3",
        "deepseekv3",
        [
            ("<｜begin▁of▁sentence｜>", "older delim"),
            # The system's text has no header.
            ("Be brief.", "older inst"),
            ("<｜User｜>", "current delim"),
            ("Sky?", "current user"),
            ("<｜Assistant｜>", "current delim"),
            ("I look.", "current assistant"),
            ("<｜tool▁calls▁begin｜>", "current delim"),
            (
                '<｜tool▁call▁begin｜>function<｜tool▁sep｜>sky\n```json\n{"at": "Bonn"}\n```<｜tool▁call▁end｜>',
                "current tool_call",
            ),
            ("<｜tool▁calls▁end｜><｜end▁of▁sentence｜>", "current delim"),
            ("<｜tool▁outputs▁begin｜><｜tool▁output▁begin｜>", "current delim"),
            ("grey", "current obs"),
            ("<｜tool▁output▁end｜><｜tool▁outputs▁end｜>", "current delim"),
        ],
    ),
]
