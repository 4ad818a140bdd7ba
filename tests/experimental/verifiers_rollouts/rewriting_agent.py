"""A taskset and its agent, found by the library by this file's name: sub-agents, and a rewritten history."""

import aiohttp
import verifiers.v1 as vf

__all__ = ["Agent", "Questions"]

TOOL = {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": {}}}


class Question(vf.Task):
    @vf.reward
    async def last_letters(self, trace: vf.Trace) -> float:
        return sum(map(ord, trace.last_reply)) % 7 / 7

    @vf.metric
    async def replies(self, trace: vf.Trace) -> float:
        return float(len(trace.assistant_messages))


class Questions(vf.Taskset[Question, vf.TasksetConfig]):
    def load(self):
        for text in ("one", "fails", "calls"):
            yield Question(vf.TaskData(prompt=text, system_prompt="Think."), self.config.task)


class Agent(vf.Harness[vf.HarnessConfig]):
    APPENDS_SYSTEM_PROMPT = True
    NEEDS_CONTAINER = False
    EXECUTES_CODE = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        if data.prompt == "fails":
            raise ConnectionError("no\nsandbox")

        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {secret}"}) as session:

            async def ask(*messages, **options):
                body = {"model": ctx.model, "messages": list(messages), **options}
                async with session.post(f"{endpoint}/chat/completions", json=body) as reply:
                    return (await reply.json())["choices"][0]["message"]

            def said(text):
                return {"role": "user", "content": text}

            question = said(data.prompt)
            if data.prompt == "calls":
                call = await ask(question, tools=[TOOL])
                result = {"role": "tool", "content": "3", "tool_call_id": call["tool_calls"][0]["id"]}
                await ask(question, call, result, tools=[TOOL])
            else:
                first = await ask(question)
                await ask(question, first, said("go on"))
                for branch in ("left", "right"):
                    await ask(question, first, said(branch))
                await ask(said("in short"), max_tokens=2)
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")
