"""The trainer as the model of `verifiers`: its episodes run in a thread of their own, and this one draws their turns.

A call of a harness reaches [`TrainerClient`], which puts it into a queue. The thread in which the trainer called its
`rollout_func` takes the calls of all episodes together, renders them by the chat template as a server does, and draws
them by the trainer's own `_generate_single_turn`: transformers or vLLM, with the adapter as it is now. So torch, the
tokenizer and collectives stay in one thread. The graph of the library then compares tokens: a turn whose rendered
history continues what was sampled extends its branch, and any other one is a new branch.
"""

import asyncio
import json
import queue
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from verifiers.v1 import (
    AssistantMessage,
    Client,
    Env,
    EnvConfig,
    Episode,
    ModelContext,
    Response,
    Task,
    ToolCall,
    Trace,
    TrainClientConfig,
    Usage,
)
from verifiers.v1.clients.train import serialize_completion, tool_to_wire
from verifiers.v1.dialects import ChatDialect
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.graph import PendingTurn
from verifiers.v1.interception import InterceptionServerConfig
from verifiers.v1.types import TurnTokens

from ...compat.trl import parse_response
from ...compat.trl_rollouts import has_response_format, with_response_schema
from ...prefix_sharing.ranks import reduced_over_ranks
from ...utils.substitute import Substitute

if TYPE_CHECKING:
    from trl import GRPOTrainer

# Seconds without a new call after which a turn is drawn although some episodes have not called.
PATIENCE = 0.2
# Names the trainer's client on the interception server; nothing connects to its address.
CLIENT_CONFIG = TrainClientConfig(base_url="http://trainer.invalid/v1", api_key_var="TRAINER_HAS_NO_API_KEY")


@dataclass
class AgentCall:
    """A call of the model: the turn to draw, its limit of tokens, and its response; `number` counts its episode's."""

    episode: int
    number: int
    turn: PendingTurn
    max_tokens: int | None
    response: "Future[Response]" = field(default_factory=Future)


class TrainerClient(Client):
    """The model client of all episodes: a call waits until the trainer has drawn it."""

    def __init__(self):
        self.calls: queue.SimpleQueue[AgentCall | None] = queue.SimpleQueue()  # `None`: an episode is over
        self.episodes: dict[str, int] = {}  # of a trace
        self.counts: Counter[int] = Counter()  # of an episode's calls

    async def get_response(
        self,
        dialect: Any,
        body: dict,
        sampling: Any,
        session_id: str | None = None,
        turn: PendingTurn | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Response:
        if not isinstance(dialect, ChatDialect):
            # A chat template renders the turn, as in the library's own client for training.
            raise NotImplementedError(f"the trainer answers chat completions alone, and no {type(dialect).__name__}")
        episode = self.episodes[session_id]
        self.counts[episode] += 1
        limit = body.get("max_tokens") or body.get("max_completion_tokens")
        call = AgentCall(episode, self.counts[episode], turn, limit)
        self.calls.put(call)
        response = await asyncio.wrap_future(call.response)
        response.raw = serialize_completion(response, body["model"])
        return response


def played(environment: Env, tasks: list[Task], trainer: "GRPOTrainer") -> list[Episode]:
    """An episode of each task, whose turns this thread draws. Collective if the trainer has several processes."""
    client = TrainerClient()
    episodes: list[Episode | None] = [None] * len(tasks)
    context = ModelContext(model="trainer", client=CLIENT_CONFIG)

    async def play(number: int) -> None:
        def remember(trace: Trace) -> None:
            client.episodes[trace.id] = number

        try:
            # An episode that fails is played again as often as `retries` of the environment's config has it.
            (slot,) = environment.slots(tasks[number])
            episodes[number] = await environment.run_slot(slot, context, on_trace=remember)
        finally:
            client.calls.put(None)

    async def play_all() -> None:
        # The environment is the user's, so it keeps its config.
        with_one_server = Substitute(environment, config=_with_one_server(environment.config))
        async with type(environment).serving(with_one_server):
            environment._interception.clients[CLIENT_CONFIG.model_dump_json()] = client
            await asyncio.gather(*map(play, range(len(tasks))))

    with _in_a_thread(play_all) as playing:
        rounds = _together(client.calls, len(tasks), playing)
        while True:
            calls = next(rounds, [])
            # A forward may be collective, so every rank draws equally many prompts equally often.
            most = int(reduced_over_ranks([len(calls)], trainer.accelerator.device)[0])
            if most == 0:
                break
            _draw(calls, most, trainer)
        playing.result()
    return episodes


def _with_one_server(config: EnvConfig) -> EnvConfig:
    """A config that serves by one server. A pool makes servers as they are needed, each with clients of its own."""
    if isinstance(config.interception, InterceptionServerConfig):
        return config
    return config.model_copy(update={"interception": InterceptionServerConfig()})


@contextmanager
def _in_a_thread(play_all: Callable[[], Coroutine]) -> Iterator["Future[None]"]:
    """Run a coroutine in a loop of its own thread; an error in the block cancels it, and waits for its clean-up."""
    started: Future[tuple] = Future()

    async def main() -> None:
        started.set_result((asyncio.get_running_loop(), asyncio.current_task()))
        await play_all()

    with ThreadPoolExecutor(1, "verifiers") as pool:
        playing = pool.submit(asyncio.run, main())
        try:
            yield playing
        except BaseException:
            loop, task = started.result()
            if not playing.done():
                loop.call_soon_threadsafe(task.cancel)
            raise


def _together(
    calls: "queue.SimpleQueue[AgentCall | None]", episodes: int, playing: "Future[None]"
) -> Iterator[list[AgentCall]]:
    """The calls that are drawn together: one of every episode that plays, or those that have come for a while."""
    waiting: list[AgentCall] = []
    while episodes or waiting:
        try:
            call = calls.get(timeout=PATIENCE)
        except queue.Empty:
            if playing.done():
                return  # it failed outside of an episode
            is_complete = True
        else:
            if call is None:
                episodes -= 1
            else:
                waiting.append(call)
            is_complete = len(waiting) >= episodes
        if waiting and is_complete:
            yield sorted(waiting, key=lambda call: (call.episode, call.number))
            waiting = []


def _draw(calls: list[AgentCall], count: int, trainer: "GRPOTrainer") -> None:
    """Draw the turns of `calls`, and answer them; `count` prompts are drawn, and the rest are for no call."""
    tokenizer = trainer._tokenizer
    prompts = [_rendered(call.turn, tokenizer, trainer.chat_template_kwargs) for call in calls]
    fillings = [[tokenizer.eos_token_id]] * (count - len(calls))
    completions, logprobs = trainer._generate_single_turn(prompts + fillings, None, {}, 1)
    for number, call in enumerate(calls):
        limit = call.max_tokens
        tokens = TurnTokens(
            prompt_ids=prompts[number],
            completion_ids=completions[number][:limit],
            completion_logprobs=[] if logprobs is None else logprobs[number][:limit],
        )
        # The library gives a call up when its agent's time is over.
        if call.response.set_running_or_notify_cancel():
            call.response.set_result(_response(call, tokens, trainer))


def _rendered(turn: PendingTurn, tokenizer: Any, options: dict[str, Any]) -> list[int]:
    """The tokens of a turn's prompt, by the tokenizer's own chat template."""
    messages = [message_to_wire(message) for message in turn.prompt]
    for message in messages:
        for call in message.get("tool_calls") or ():
            # Chat templates get the arguments of calls as a dictionary.
            call["function"] = {**call["function"], "arguments": _parsed(call["function"]["arguments"])}
    tools = [tool_to_wire(tool) for tool in turn.tools] or None
    return tokenizer.apply_chat_template(
        messages, tools=tools, add_generation_prompt=True, tokenize=True, return_dict=False, **options
    )


def _parsed(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except json.JSONDecodeError:
        return arguments


def _response(call: AgentCall, tokens: TurnTokens, trainer: "GRPOTrainer") -> Response:
    """What was sampled, as the message that a server of the model would return."""
    tokenizer = trainer._tokenizer
    if call.turn.tools:
        with_response_schema(tokenizer)
    if has_response_format(tokenizer):
        tools = [tool_to_wire(tool) for tool in call.turn.tools]
        message = parse_response(tokenizer, tokens.completion_ids, prefix=tokens.prompt_ids, tools=tools)
    else:
        message = {"content": tokenizer.decode(tokens.completion_ids, skip_special_tokens=True)}
    functions = [tool_call["function"] for tool_call in message.get("tool_calls") or ()]
    calls = [
        # An id is unique in a trace. Mistral's templates take nine digits or letters.
        ToolCall(id=f"{call.number:06}{i:03}", name=function["name"], arguments=json.dumps(function["arguments"]))
        for i, function in enumerate(functions)
    ]
    has_ended = tokens.completion_ids[-1] in trainer.eos_token_ids
    finished = "tool_calls" if calls else "stop"
    return Response(
        id="trainer",
        created=0,
        model="trainer",
        message=AssistantMessage(
            content=message.get("content") or None,
            reasoning_content=message.get("reasoning_content") or message.get("thinking"),
            tool_calls=calls or None,
        ),
        finish_reason=finished if has_ended else "length",
        usage=Usage(prompt_tokens=len(tokens.prompt_ids), completion_tokens=len(tokens.completion_ids)),
        tokens=tokens,
    )
