"""Conversations in every format, tagged by hand."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Sample:
    """A prompt, message by message.

    Attributes:
        family: Which tokenizer of `chats.TOKENS` reads it.
        messages: Age, a space and text; «user:text» is the user's, «image user:text» an image of the user's, and what
            is in no such brackets a delimiter.
        template: Markers that the chat template holds, where they are no tokens.
    """

    family: str
    messages: list[str]
    template: str = ""

    @property
    def pieces(self) -> list[tuple[str, str]]:
        """Text and full name of its tag."""
        found = []
        for age, message in (x.split(" ", 1) for x in self.messages):
            for text in re.split("(«.*?»)", message, flags=re.DOTALL):
                tag, text = text[1:-1].split(":", 1) if text.startswith("«") else ("delim", text)
                kind, semantic = tag.split() if " " in tag else ("text", tag)
                found.append((text, f"{age}|{kind}|{semantic}"))
        return found

    @property
    def text(self) -> str:
        return "".join(text for text, _ in self.pieces)


SAMPLES = {
    "qwen3-five-turns": Sample(
        "qwen3",
        [
            "older <|im_start|>system\n«inst:Be brief.»<|im_end|>\n",
            "older <|im_start|>user\n«user:One»<|im_end|>\n",
            "older <|im_start|>assistant\n«assistant:1»<|im_end|>\n",
            "older <|im_start|>user\n«user:Two»<|im_end|>\n",
            "older <|im_start|>assistant\n«assistant:2»<|im_end|>\n",
            "turn_m2 <|im_start|>user\n«user:Sky?»<|im_end|>\n",
            'turn_m2 <|im_start|>assistant\n«assistant:Hm.\n»<tool_call>\n«tool_call:{"name": "sky"}\n»</tool_call>'
            "<|im_end|>\n",
            # Results come as a user's message, and begin no turn.
            "turn_m2 <|im_start|>user\n<tool_response>\n«obs:grey\n»</tool_response>\n<tool_response>\n«obs:rain\n»"
            "</tool_response><|im_end|>\n",
            "turn_m2 <|im_start|>assistant\n«assistant:Rain.»<|im_end|>\n",
            "turn_m1 <|im_start|>user\n«user:Ah»<|im_end|>\n",
            "turn_m1 <|im_start|>assistant\n«assistant:Yes»<|im_end|>\n",
            "current <|im_start|>user\n«user:Why?»<|im_end|>\n",
            "current <|im_start|>assistant\n<think>\n«reasoning:Air.\n»</think>\n\n«assistant:Water.»<|im_end|>\n",
        ],
    ),
    "qwen3-tools-and-typed-markers": Sample(
        "qwen3",
        [
            # The prompt explains calls with their own markers.
            'older <|im_start|>system\n«inst:# Tools\n\n<tools>\n{"name": "sky"}\n</tools>\n\nCalls go within '
            '<tool_call></tool_call> XML tags:\n<tool_call>\n{"name": <function-name>}\n</tool_call>»<|im_end|>\n',
            "current <|im_start|>user\n«user:What are <think>, <tool_call>, <tool_response>?»<|im_end|>\n",
            "current <|im_start|>assistant\n<think>\n\n</think>\n\n",
        ],
    ),
    "llama3.1-json-call": Sample(
        "llama3",
        [
            "older <|begin_of_text|>",
            "older <|start_header_id|>system<|end_header_id|>\n\n«inst:Today Date: 26 Jul 2024\n\nBe brief.»<|eot_id|>",
            "turn_m1 <|start_header_id|>user<|end_header_id|>\n\n«user:Sky?»<|eot_id|>",
            'turn_m1 <|start_header_id|>assistant<|end_header_id|>\n\n«tool_call:{"name": "sky", "parameters": {}}»'
            "<|eot_id|>",
            'turn_m1 <|start_header_id|>ipython<|end_header_id|>\n\n«obs:"grey"»<|eot_id|>',
            # Braces alone make no call.
            'turn_m1 <|start_header_id|>assistant<|end_header_id|>\n\n«assistant:{"sky": "grey"}»<|eot_id|>',
            'current <|start_header_id|>user<|end_header_id|>\n\n«user:{"name": "Ann"}»<|eot_id|>',
            "current <|start_header_id|>assistant<|end_header_id|>\n\n",
        ],
    ),
    "llama3.1-python-tag": Sample(
        "llama3",
        [
            "older <|begin_of_text|>",
            "older <|start_header_id|>system<|end_header_id|>\n\n«inst:Environment: ipython\nTools: sky\n\n»<|eot_id|>",
            "current <|start_header_id|>user<|end_header_id|>\n\n«user:Sky?»<|eot_id|>",
            "current <|start_header_id|>assistant<|end_header_id|>\n\n<|python_tag|>«tool_call:sky.call()»<|eom_id|>",
            'current <|start_header_id|>ipython<|end_header_id|>\n\n«obs:"grey"»<|eot_id|>',
            "current <|start_header_id|>assistant<|end_header_id|>\n\n",
        ],
    ),
    "gemma3": Sample(
        "gemma3",
        [
            "older <bos>",
            # There is no system role: what the template puts before the first question counts to it.
            "turn_m1 <start_of_turn>user\n«user:Be brief.\n\nHi»<end_of_turn>\n",
            "turn_m1 <start_of_turn>model\n«assistant:Ho»<end_of_turn>\n",
            "current <start_of_turn>user\n«image user:<start_of_image>»«user:What?»<end_of_turn>\n",
            "current <start_of_turn>model\n",
        ],
    ),
    "gpt-oss": Sample(
        "gptoss",
        [
            "older <|start|>system<|message|>«inst:You are ChatGPT.»<|end|>",
            "older <|start|>developer<|message|>«inst:# Tools\n\nnamespace functions {\n\ntype sky = () => any;\n\n}»"
            "<|end|>",
            "turn_m1 <|start|>user<|message|>«user:Hi»<|end|>",
            "turn_m1 <|start|>assistant<|channel|>final<|message|>«assistant:Ho»<|end|>",
            "current <|start|>user<|message|>«user:Sky?»<|end|>",
            "current <|start|>assistant<|channel|>analysis<|message|>«reasoning:Look up.»<|end|>",
            "current <|start|>assistant to=functions.sky<|channel|>commentary json<|message|>«tool_call:{}»<|call|>",
            'current <|start|>functions.sky to=assistant<|channel|>commentary<|message|>«obs:"grey"»<|end|>',
            "current <|start|>assistant",
        ],
    ),
    "glm4.5": Sample(
        "glm4moe",
        [
            "older [gMASK]<sop>",
            "older <|system|>\n«inst:Be brief.»",
            "turn_m1 <|user|>\n«user:Hi»",
            "turn_m1 <|assistant|>\n<think></think>\n«assistant:Ho»",
            "current <|user|>\n«user:Sky?»",
            "current <|assistant|>\n<think>«reasoning:Look»</think>\n<tool_call>«tool_call:sky\n<arg_key>at</arg_key>"
            "\n»</tool_call>",
            "current <|observation|>\n<tool_response>\n«obs:grey\n»</tool_response>",
            "current <|assistant|>",
        ],
    ),
    "mistral-v3": Sample(
        "mistral",
        [
            "older <s>",
            'older [AVAILABLE_TOOLS]«inst: [{"name": "sky"}]»[/AVAILABLE_TOOLS]',
            "turn_m1 [INST]«user: Sky?»",
            'turn_m1 [/INST][TOOL_CALLS]«tool_call: [{"name": "sky"}]»</s>',
            'turn_m1 [TOOL_RESULTS]«obs: {"content": "grey"}»[/TOOL_RESULTS]«assistant: Grey.»</s>',
            "current [INST]«user: Ah»",
            "current [/INST]",
        ],
    ),
    "mistral-v13": Sample(
        "mistral",
        [
            "older <s>[SYSTEM_PROMPT]«inst:Be brief.»[/SYSTEM_PROMPT]",
            "current [INST]«user:See»«image user:[IMG][IMG][IMG_BREAK][IMG][IMG][IMG_END]»",
            "current [/INST][THINK]«reasoning:Hm»[/THINK][TOOL_CALLS]«tool_call:f»[ARGS]«tool_call:{}»[TOOL_CALLS]"
            "«tool_call:g»</s>",
        ],
    ),
    "falcon3-markers-as-text": Sample(
        "falcon3",
        [
            "older <|system|>\n«inst:Be brief.\n»",
            "turn_m1 <|user|>\n«user:Is <| a pipe?\n»",
            "turn_m1 <|assistant|>\n«assistant:Yes»<|endoftext|>\n",
            "current <|user|>\n«user:Ah\n»",
            "current <|assistant|>\n",
        ],
        "<|user|><|assistant|>",
    ),
    "phi3.5": Sample(
        "phi3_5",
        [
            "older <|system|>\n«inst:Be brief.»<|end|>\n",
            "turn_m1 <|user|>\n«user:Hi»<|end|>\n",
            "turn_m1 <|assistant|>\n«assistant:Ho»<|end|>\n",
            "current <|user|>\n«user:Oh»<|end|>\n",
            "current <|assistant|>\n",
        ],
    ),
    "deepseek-v3": Sample(
        "deepseekv3",
        [
            # The system's text has no header.
            "older <｜begin▁of▁sentence｜>«inst:Be brief.»",
            "current <｜User｜>«user:Sky?»",
            "current <｜Assistant｜>«assistant:I look.»",
            "current <｜tool▁calls▁begin｜>«tool_call:<｜tool▁call▁begin｜>function<｜tool▁sep｜>sky\n```json\n{}\n```"
            "<｜tool▁call▁end｜>»<｜tool▁calls▁end｜><｜end▁of▁sentence｜>",
            "current <｜tool▁outputs▁begin｜><｜tool▁output▁begin｜>«obs:grey»<｜tool▁output▁end｜>"
            "<｜tool▁outputs▁end｜>",
        ],
    ),
}
