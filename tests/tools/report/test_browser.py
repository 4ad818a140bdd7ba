"""The page in a real browser, from `file://`.

Covers `tools/report/keep.py`.
"""

import io
import json

import pytest
import torch

from tests.tools.report.browser import CHROMIUM, Browser
from tests.tools.report.folders import group, logged, trl_run, write_completions, write_state
from trl_fsdp_qlora.tools.report import page
from trl_fsdp_qlora.tools.report.keep import write_completions as keep_completions
from trl_fsdp_qlora.tools.report.page import write_report

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(CHROMIUM is None, reason="needs chromium: apt-get install -y chromium"),
]


@pytest.fixture(scope="module")
def browser():
    with Browser() as started:
        yield started


def open_report(browser, folder):
    """Open the page of a run, and wait until its curves are drawn."""
    target = folder / "report.html"
    write_report(folder, target)
    browser.media()
    browser.open(target)
    browser.wait_for("views.length == document.querySelectorAll('#curves > .charts > .chart').length")


def texts(browser, selector: str) -> list[str]:
    return browser.evaluate(f"[...document.querySelectorAll({json.dumps(selector)})].map((each) => each.textContent)")


def type_into(browser, control: str, value: str) -> None:
    """Set a filter as a person does, and wait for the list."""
    browser.evaluate(
        f"(() => {{ const control = byId({json.dumps(control)}); control.value = {json.dumps(value)};"
        "for (const kind of ['input', 'change']) control.dispatchEvent(new Event(kind)); })()"
    )
    browser.evaluate("new Promise((done) => setTimeout(done, 200))")


def colors(png: bytes) -> dict[tuple[int, int, int], int]:
    """Numbers of pixels by colour."""
    from PIL import Image

    return {color: count for count, color in Image.open(io.BytesIO(png)).convert("RGB").getcolors(1 << 24)}


# The text of an element with that of the shadow trees inside it, where Bokeh's tooltips are.
DEEP_TEXT = """((node) => {
    const walk = (each) => (each.nodeType === 3 ? each.data : "") +
        [...(each.shadowRoot?.childNodes ?? []), ...each.childNodes].map(walk).join("");
    return walk(node);
})"""


def test_it_opens_without_errors_light_and_dark_and_draws_curves(browser, tmp_path):
    open_report(browser, trl_run(tmp_path / "run"))
    light = browser.screenshot()
    assert colors(light)[0x3B, 0x7D, 0xD8] > 500  # of the curves
    browser.media(prefers_color_scheme="dark")
    browser.evaluate("new Promise((done) => setTimeout(done, 300))")
    ground = "getComputedStyle(document.body).backgroundColor"
    assert browser.evaluate(ground) == "rgb(20, 23, 27)"
    assert browser.screenshot() != light
    browser.evaluate("byId('theme').click()")
    assert browser.evaluate(ground) == "rgb(250, 250, 248)"
    browser.media(media="print")
    assert browser.evaluate("getComputedStyle(byId('filters')).display") == "none"
    assert browser.evaluate("getComputedStyle(byId('completions')).overflowY") == "visible"
    assert browser.troubles == []


def test_filters_by_step_reward_text_order_and_prompt(browser, tmp_path):
    open_report(browser, trl_run(tmp_path / "run"))
    assert texts(browser, "#status") == ["16 completions of 4 prompts, step 100"]
    type_into(browser, "step", "30")
    assert all("step 30," in text for text in texts(browser, ".completion .text"))
    type_into(browser, "low", "0.5")
    assert texts(browser, ".reward") == ["reward 1"] * 4
    type_into(browser, "text", "PROMPT 2:")
    assert texts(browser, "#status") == ["1 completion of 1 prompt, step 30"]
    assert texts(browser, "mark") == ["prompt 2:"]
    browser.evaluate("byId('clear').click()")
    type_into(browser, "order", "best")
    assert texts(browser, ".reward")[:4] == ["reward 1", "reward 0", "reward 0", "reward 0"]
    type_into(browser, "order", "worst")
    assert texts(browser, ".reward")[:4] == ["reward 0", "reward 0", "reward 0", "reward 1"]
    browser.evaluate("document.querySelector('.prompt button').click()")
    assert texts(browser, "#status")[0].startswith("40 completions of 10 prompts, all steps, one prompt over time")
    assert set(texts(browser, ".prompt .text")) == {"What is 0 + 0?"}
    assert len(texts(browser, ".group")) == 8
    browser.evaluate("byId('more').click()")
    assert len(texts(browser, ".group")) == 10
    assert browser.evaluate("byId('more').hidden")
    assert browser.troubles == []


def test_filters_work_from_the_keyboard(browser, tmp_path):
    open_report(browser, trl_run(tmp_path / "run"))
    browser.evaluate("byId('step').focus()")
    browser.press("ArrowUp", 38)
    assert texts(browser, "#status") == ["16 completions of 4 prompts, step 90"]
    browser.evaluate("byId('earlier').focus()")
    browser.press("Enter", 13, "\r")
    assert texts(browser, "#status") == ["16 completions of 4 prompts, step 80"]
    # Each control has a name for a screen reader, and each curve its values in words.
    unnamed = (
        "[...document.querySelectorAll('input,select,button')].filter((c) => !(c.labels?.length || c.ariaLabel ||"
    )
    assert browser.evaluate(f"{unnamed} c.textContent.trim())).length") == 0
    words = browser.evaluate("document.querySelector('#chart-0 [role=img]').ariaLabel")
    assert words == "Reward. reward: 0.3328 at step 10, 0.8747 at step 100"


def test_a_click_on_a_curve_shows_the_completions_of_that_step(browser, tmp_path):
    open_report(browser, trl_run(tmp_path / "run"))
    left, top, width, height = browser.evaluate(
        "(() => { const b = document.querySelector('#chart-0 .plot').getBoundingClientRect();"
        "return [b.left, b.top, b.width, b.height]; })()"
    )
    browser.move_to(left + width / 2, top + height / 2)
    browser.wait_for(f"{DEEP_TEXT}(document.body).includes(': reward 0.')")  # the tooltip
    browser.click(left + width / 2, top + height / 2)
    step = int(texts(browser, "#status")[0].rsplit(" ", 1)[1])
    assert 40 <= step <= 70
    browser.evaluate(
        "(() => { byId('smoothing').value = 0.9; byId('smoothing').dispatchEvent(new Event('input')); })()"
    )
    shown, raw = browser.evaluate("[[...sources[0].source.data.shown], [...sources[0].source.data.raw]]")
    assert shown[0] == raw[0] and shown[-1] < raw[-1]
    assert browser.troubles == []


HOSTILE = [
    "<script>window.harm = 1</script><img src=x onerror='window.harm = 1'>",
    "</script><script>window.harm = 1</script><!--",
    "\u202e\u2066evil\u2069 \u0645\u0631\u062d\u0628\u0627 \u200f",
    "x" * 100_000 + "<b>end</b>",
    "nul \x00 and escape \x1b[31m and bell \x07",
    "\u2028\u2029 \ufeff {{ 7 * 7 }} ${window.harm = 1}",
]


def test_hostile_completions_do_nothing(browser, tmp_path):
    name = "<img src=x onerror='window.harm = 1'>"
    metric = "$$\\html{<b>}$$ @{x} <img src=x onerror='window.harm = 1'>"
    folder = tmp_path / "<b>run"
    history = [{**entry, f"rewards/{name}/mean": 0.5, metric: 1.0, "reward": 0.5} for entry in logged(100)[:-1]]
    write_state(folder, history)
    rows = []
    for text in HOSTILE:
        rows += [{"prompt": text, "completion": text, name: 0.5, "extra": text, "advantage": 0.0}]
        message = {
            "role": name,
            "content": text,
            "tool_calls": [{"function": {"name": text, "arguments": {"a": text}}}],
        }
        rows += [{"prompt": text, "completion": text, name: 1.0, "extra": json.dumps(message), "advantage": 0.0}]
    write_completions(folder, 10, rows)
    messages = [[{"role": name, "content": text}, {"role": "tool", "content": text}] for text in HOSTILE]
    write_completions(folder, 20, [{"prompt": m, "completion": m, name: 1.0, "advantage": 0.0} for m in messages])
    (folder / "metrics.json").write_text(json.dumps({"model": name, "startup": HOSTILE[0], "warnings": HOSTILE}))
    open_report(browser, folder)
    browser.evaluate("byId('further').open = true")
    browser.wait_for("views.length == data.charts.length")
    browser.evaluate("document.querySelectorAll('.chart details').forEach((each) => each.open = true)")
    for step in ("10", "20"):
        type_into(browser, "step", step)
        type_into(browser, "text", "a")
        type_into(browser, "text", "")
        browser.evaluate("document.querySelectorAll('.whole').forEach((each) => each.click())")
    number = len(json.loads(browser.evaluate("JSON.stringify(data.charts)")))
    for chart in range(number):
        browser.evaluate(f"byId('chart-{chart}').scrollIntoView()")
        left, top = browser.evaluate(
            f"(() => {{ const b = byId('chart-{chart}').querySelector('.plot').getBoundingClientRect();"
            "return [b.left + b.width / 2, b.top + 80]; })()"
        )
        browser.move_to(left, top)
    browser.evaluate("new Promise((done) => setTimeout(done, 300))")
    assert browser.evaluate("window.harm") is None
    assert browser.evaluate("document.querySelectorAll('img, iframe, b.x, #groups script').length") == 0
    assert browser.evaluate("document.scripts.length") == 4  # the data, Bokeh's two, the page's
    type_into(browser, "step", "10")
    shown = texts(browser, ".prompt .text")
    assert shown[0] == HOSTILE[0]
    assert shown[2].startswith("U+202EU+2066evilU+2069 ")
    assert shown[4] == "nul U+0000 and escape U+001B[31m and bell U+0007"
    # No line is wider than its box, and none turns what is around it.
    wide = "[...document.querySelectorAll('.text')].filter((each) => each.scrollWidth > each.clientWidth + 1).length"
    assert browser.evaluate(wide) == 0
    assert browser.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert browser.evaluate("getComputedStyle(document.querySelector('.text')).unicodeBidi") == "isolate"
    assert browser.troubles == []


def test_fifty_thousand_completions_open_in_three_seconds(tmp_path, monkeypatch):
    monkeypatch.setattr(page, "MEGABYTES", 20)
    write_state(tmp_path, logged(1000))
    for step in range(10, 110, 10):
        rows = []
        for i in range(625):
            texts_ = [f"so {i} + {j} is {i + j}, and that is the answer to the question" for j in range(8)]
            rows += group(f"What is {i} + {step}?", texts_, [1.0, *[0.0] * 7])
        write_completions(tmp_path, step, rows)
    with Browser() as fresh:  # whose page's process has computed nothing else
        open_report(fresh, tmp_path)
        assert fresh.evaluate("data.completions.rows.text.length") == 50_000
        assert 0 < fresh.cpu_seconds() < 3  # of the processor, not of a clock: the machine may be busy
        type_into(fresh, "step", "")
        type_into(fresh, "text", "so 624 + 7 is 631")
        assert texts(fresh, "#status") == ["10 completions of 10 prompts, all steps"]
        assert fresh.troubles == []


def test_tool_calls_are_a_dialogue(browser, tmp_path):
    write_state(tmp_path, logged(100))
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
    other = {"type": "function", "function": {"name": "say", "arguments": {"text": "hi"}}}
    episode = [
        {"role": "assistant", "content": "", "tool_calls": [call, other]},
        {"role": "tool", "name": "add", "content": "3"},
        {"role": "assistant", "content": "It is 3."},
    ]
    prompt = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 2?"}]
    write_completions(tmp_path, 10, group(prompt, [episode, episode[2:]], [1.0, 0.0]))
    open_report(browser, tmp_path)
    assert texts(browser, ".prompt .role") == ["system", "user"]
    assert texts(browser, ".completion:nth-of-type(1) .role") == ["assistant", "tool add", "assistant"]
    assert texts(browser, ".call") == ["→ add(a=1, b=2)", '→ say(text="hi")']
    assert texts(browser, ".completion:nth-of-type(2) .text") == ["It is 3."]
    type_into(browser, "text", "say(")
    assert texts(browser, "#status") == ["1 completion of 1 prompt, step 10"]


def test_pictures_are_thumbnails(browser, tmp_path):
    Image = pytest.importorskip("PIL.Image")
    image = Image.new("RGB", (640, 480), "red")
    prompt = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Colour?"}]}]
    drawn = {
        "prompt": [prompt],
        "completion": ["red"],
        "advantage": [0.0],
        "images": [[image]],
        "lengths": torch.tensor([[1, 0]]),
        "rewards": {"correct": [1.0]},
        "extra": {},
    }
    keep_completions(tmp_path, 10, drawn)
    write_state(tmp_path, logged(100))
    open_report(browser, tmp_path)
    assert texts(browser, ".prompt .text") == ["[image]Colour?"]
    browser.wait_for("[...document.images].every((image) => image.complete)")
    assert browser.evaluate("[...document.images].map((image) => [image.naturalWidth, image.naturalHeight])") == [
        [128, 96]
    ]
    assert browser.troubles == []


def test_a_page_without_anything(browser, tmp_path):
    open_report(browser, tmp_path)
    assert texts(browser, ".none") == ["No metric was logged.", "No completions were recorded."]
    assert browser.troubles == []


def test_a_share_that_stays_zero_is_between_0_and_100_percent(browser, tmp_path):
    write_state(tmp_path, [{"step": step, "frac_reward_zero_std": 0.0} for step in (1, 2, 3)], 3)
    open_report(browser, tmp_path)
    assert browser.evaluate("[plots[0].y_range.start, plots[0].y_range.end]") == [0, 1]
    assert browser.evaluate("plots[0].xaxes[0].ticker.min_interval") == 1
    assert browser.troubles == []


def test_one_step(browser, tmp_path):
    write_state(tmp_path, [{"step": 1, "reward": 0.5}], 1)
    open_report(browser, tmp_path)
    assert texts(browser, ".run")[0].endswith(" 1 step")
