"""The window to paint in: what it computes and saves, who may reach it, and how it works in a browser."""

import base64
import http.client
import io
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from urllib.parse import urlsplit

import numpy as np
import pytest
from PIL import Image

from tests.cases import cases
from tests.segment.live.browser import CHROMIUM, Browser
from tests.segment.test_pipeline import scene
from vispe.cli.main import main
from vispe.errors import InputError, OptionError
from vispe.images.read import read_image
from vispe.segment.live.live_segmentation import Live
from vispe.segment.live.paint.open_page import open_paint
from vispe.segment.live.paint.server import Server
from vispe.segment.live.paint.session import checked_names, checked_strokes
from vispe.segment.model.model_file import load_model

STROKES = [
    {"class": 1, "width": 3, "points": [[2, 2], [30, 3], [44.2, 2.7]]},
    {"class": 2, "width": 5, "points": [[20, 20]]},
]


@pytest.fixture
def image(tmp_path):
    grey, _, scribbles = scene(seed=0)
    Image.fromarray(grey).save(tmp_path / "a.png")
    y, x = np.argwhere(scribbles == 2)[0]
    return tmp_path / "a.png", (int(x), int(y))


def strokes_of(position):
    return [STROKES[0], {**STROKES[1], "points": [list(position)]}]


@pytest.fixture
def paint(image):
    return open_paint(image[0], features="filters")


@pytest.fixture
def server(paint):
    with Server(paint) as actual:
        thread = threading.Thread(target=actual.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        yield actual
        actual.shutdown()


def send_request(server, path, content=None, token=None, headers=()):
    """Status, headers and body of a request."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)
    body = None if content is None else json.dumps(content)
    kind = {"Content-Type": "application/json"} if body else {}
    requested = f"{path}?token={server.token if token is None else token}"
    connection.request("POST" if body else "GET", requested, body, {**kind, **dict(headers)})
    actual = connection.getresponse()
    response = actual.status, dict(actual.getheaders()), actual.read()
    connection.close()
    return response


def test_the_result_is_that_of_the_engine_and_of_the_command(image, paint, tmp_path):
    path, position = image
    strokes = strokes_of(position)
    actual = paint.update({"names": ["ground", "disc"], "strokes": strokes})
    assert actual["ready"]
    config = paint.live._features.config
    live = Live(paint.image, features=config, classifier="ensemble", names=["ground", "disc"])
    expected = live.update(paint.images[paint.shown].labels())
    assert np.array_equal(paint.prediction.labels, expected.labels)
    assert paint.save() == ["a_strokes.json", "model.vispe", "a_seg.png"]
    out = tmp_path / "a_paint"
    assert main(["segment", str(path), "--labels", str(out / "a_strokes.json"), "--classes", "ground,disc",
                 "--features", "filters", "-o", str(tmp_path / "o")]) == 0  # fmt: skip
    mine, theirs = (np.asarray(Image.open(p)) for p in (out / "a_seg.png", tmp_path / "o/a_seg.png"))
    assert np.array_equal(mine, theirs)
    assert main(["apply", str(out / "model.vispe"), str(path), "-o", str(tmp_path / "again")]) == 0
    assert np.array_equal(mine, np.asarray(Image.open(tmp_path / "again/a_seg.png")))
    with Image.open(io.BytesIO(base64.b64decode(actual["labels"]))) as displayed:
        assert np.array_equal(np.asarray(displayed), mine)
        assert displayed.info["transparency"] == 0


def test_the_preview_is_that_of_logistic_and_the_result_follows(image, paint):
    content = {"names": ["ground", "disc"], "strokes": strokes_of(image[1])}
    preview = paint.update({**content, "preview": True})
    assert preview["preview"]
    assert paint.live.model.classifier.kind == "logistic"
    assert "calibration" not in paint.live.model.notes
    options = {"features": paint.live._features.config, "names": ["ground", "disc"]}
    fast = Live(paint.image, classifier="logistic", **options)
    assert np.array_equal(paint.prediction.labels, fast.update(paint.images[paint.shown].labels()).labels)
    final = paint.update(content)
    assert not final["preview"]
    assert paint.live.model.classifier.kind == "ensemble"
    assert "calibration" in paint.live.model.notes
    assert final["labels"] != preview["labels"]
    # saving never stores a preview
    paint.update({**content, "preview": True})
    paint.save(content)
    assert load_model(paint.out / "model.vispe").classifier.kind == "ensemble"
    assert paint.update(content) == final
    plain = open_paint(image[0], features="filters", classifier="logistic")
    assert not plain.update({**content, "preview": True})["preview"]


def test_a_newer_request_interrupts_a_result(image, paint, monkeypatch):
    content = {"names": ["ground", "disc"], "strokes": strokes_of(image[1])}
    predict, answers = paint.live.predict, []

    def interrupted(page=None, step=None):
        if step is not None and not answers:
            answers.append(
                threading.Thread(target=lambda: answers.append(paint.update({**content, "preview": True})))
            )
            answers[0].start()
            while paint._newest is first[0]:
                time.sleep(0.01)
        return predict(page, step)

    first = []
    fit = paint.live.fit
    monkeypatch.setattr(paint.live, "fit", lambda preview=False: first.append(paint._newest) or fit(preview))
    monkeypatch.setattr(paint.live, "predict", interrupted)
    assert paint.update(content) == {"ready": False, "why": "another request arrived."}
    answers[0].join()
    assert answers[1]["ready"]
    assert answers[1]["preview"]
    assert paint.prediction is not None


def test_strokes_come_in_their_order_and_undo_takes_them_back(paint, image):
    strokes = strokes_of(image[1])
    first = paint.update({"names": ["a", "b"], "strokes": strokes})
    over = [*strokes, {"class": 2, "width": 9, "points": [[2, 2], [30, 2]]}]
    second = paint.update({"names": ["a", "b"], "strokes": over})
    assert second["labels"] != first["labels"]
    assert (paint.images[paint.shown].labels()[2, 5:30] == 2).all()
    covered = [*strokes, {"class": 2, "width": 9, "points": [[2, 2], [48, 2]]}]
    assert not paint.update({"names": ["a", "b"], "strokes": covered})["ready"]
    assert paint.update({"names": ["a", "b"], "strokes": strokes}) == first
    first_only = paint.update({"names": ["a", "b"], "strokes": strokes[:1]})
    assert first_only == {"ready": False, "why": "paint scribbles of at least two classes."}
    assert paint.prediction is None


def test_what_is_saved_is_not_written_over_others_files(paint, image, tmp_path):
    with pytest.raises(InputError, match=r"nothing to save yet\. Paint a scribble first"):
        paint.save()
    paint.update({"names": ["a", "b"], "strokes": strokes_of(image[1])[:1]})
    assert not paint.saved
    assert paint.save() == ["a_strokes.json"]
    assert paint.saved
    (tmp_path / "a_paint/model.vispe").write_text("mine")
    paint.update({"names": ["a", "b"], "strokes": strokes_of(image[1])})
    with pytest.raises(InputError, match=r"model\.vispe"):
        paint.save()
    assert (tmp_path / "a_paint/model.vispe").read_text() == "mine"
    (tmp_path / "a_paint/model.vispe").unlink()
    assert len(paint.save()) == len(paint.save()) == 3  # its own files may be renewed


NAMES = [None, "ab", ["a"], ["a", "a"], ["a", " "], ["a", 1], [str(i) for i in range(30)]]
NAMES += [["a" * 201, "b"], ["a", "\u202eb"], ["a", "b\x07"]]


@cases("names", NAMES)
def test_names_are_checked(names):
    with pytest.raises(OptionError, match="names="):
        checked_names(names)


@cases(
    "stroke",
    [None, 3, {}, {"class": 0, "width": 1, "points": [[1, 1]]}, {"class": 3, "width": 1, "points": [[1, 1]]},
     {"class": 1, "width": 0, "points": [[1, 1]]}, {"class": 1, "width": 1, "points": []},
     {"class": 1, "width": 1, "points": [["x", 1]]}, {"class": 1, "width": 1, "points": [[float("nan"), 1]]},
     {"class": True, "width": 1, "points": [[1, 1]]}],
)  # fmt: skip
def test_strokes_are_checked(stroke):
    with pytest.raises(InputError, match="Paint it again"):
        checked_strokes([stroke], 2, 0, (9, 9))


def test_points_outside_are_refused():
    for position in ([-5, 4], [6.6, 4], [3, 8.51]):
        with pytest.raises(InputError, match="scribble 0 has points outside the image"):
            checked_strokes([{"class": 1, "width": 1, "points": [position]}], 2, 0, (9, 7))
    actual = checked_strokes([{"class": 1, "width": 1, "points": [[-0.49, 8.49]]}], 2, 0, (9, 7))
    assert actual[0].points.tolist() == [[-0.49, 8.49]]


def test_what_is_saved_is_what_was_painted(paint, image, tmp_path):
    """Positions just alongside the border of two pixels: the file has as many digits as the result was made from."""
    rng = np.random.default_rng(0)
    points = np.stack([rng.integers(2, 45, 40), rng.integers(2, 6, 40)], 1) + rng.choice(
        [0.497, 0.4951, -0.4996], (40, 2)
    )
    strokes = [{"class": 1, "width": 1, "points": points.tolist()}, strokes_of(image[1])[1]]
    paint.update({"names": ["ground", "disc"], "strokes": strokes})
    paint.save()
    out = tmp_path / "a_paint"
    assert main(["segment", str(image[0]), "--labels", str(out / "a_strokes.json"), "--classes", "ground,disc",
                 "--features", "filters", "-o", str(tmp_path / "o")]) == 0  # fmt: skip
    mine, theirs = (np.asarray(Image.open(p)) for p in (out / "a_seg.png", tmp_path / "o/a_seg.png"))
    assert np.array_equal(mine, theirs)


def test_saving_takes_the_newest_strokes(paint, image, tmp_path):
    strokes = strokes_of(image[1])
    paint.update({"names": ["a", "b"], "strokes": strokes[:1]})
    assert len(paint.save({"names": ["a", "b"], "strokes": strokes})) == 3
    assert len(json.loads((tmp_path / "a_paint/a_strokes.json").read_text())) == 2
    assert paint.saved
    # the window sends its scribbles again when it is opened again
    paint.update({"names": ["a", "b"], "strokes": strokes})
    assert paint.saved
    paint.update({"names": ["a", "c"], "strokes": strokes})
    assert not paint.saved


@pytest.mark.parametrize("step", ["save_model", "write_labels"])
def test_a_save_that_fails_can_be_repeated(paint, image, monkeypatch, step):
    strokes = strokes_of(image[1])
    paint.update({"names": ["a", "b"], "strokes": strokes})

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(f"vispe.segment.live.paint.saved_files.{step}", full)
        with pytest.raises(OSError, match="No space"):
            paint.save()
    assert len(paint.save()) == 3
    assert len(paint.save()) == 3


@pytest.mark.parametrize("path", ["/update", "/save"])
def test_a_window_does_not_overwrite_the_strokes_of_another(server, image, path):
    strokes = strokes_of(image[1])
    names = ["a", "b"]
    first, second = ({"names": names, "window": w, "revision": 0, "strokes": strokes[:1]} for w in "12")
    assert send_request(server, "/update", first)[0] == 200
    assert (
        send_request(server, "/update", {**first, "strokes": strokes})[0] == 200
    )  # before the first answer is read
    status, _, body = send_request(server, path, second)
    assert status == 409
    assert "changed in another window. Reload this page" in json.loads(body)["error"]
    state = json.loads(send_request(server, "/state")[2])
    assert len(state["strokes"]) == 2
    # reloaded, the second window goes on, and then the first one is stale
    merged = {**second, "revision": state["revision"], "strokes": strokes[1:]}
    assert send_request(server, "/update", merged)[0] == 200
    assert send_request(server, path, first)[0] == 409
    assert len(json.loads(send_request(server, "/state")[2])["strokes"]) == 1


def raw(server, request):
    """Send bytes as they are; return the answer until the server closes."""
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=30) as connection:
        connection.sendall(request)
        parts = []
        while part := connection.recv(4096):
            parts.append(part)
    return b"".join(parts)


@pytest.mark.parametrize("length", ["²", "+5", "-1", "1e3", "", "٣"])
def test_a_length_that_is_no_number_is_refused(server, capfd, length):
    head = f"POST /update?token={server.token} HTTP/1.1\r\nHost: 127.0.0.1:{server.server_port}\r\n"
    lines = f"Content-Type: application/json\r\nContent-Length: {length}\r\n\r\n"
    response = raw(server, head.encode() + lines.encode("utf-8"))
    assert response.startswith(b"HTTP/1.1 400 ")
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize("body", ["[" * 100_000, '{"names":' * 50_000, "[1]", '"a"', "{", "\udcff"])
def test_a_body_that_is_no_object_is_refused(server, capfd, body):
    data = body.encode("utf-8", "surrogateescape")
    head = f"POST /update?token={server.token} HTTP/1.1\r\nHost: 127.0.0.1:{server.server_port}\r\n"
    lines = f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    response = raw(server, (head + lines).encode() + data)
    assert response.startswith(b"HTTP/1.1 400 ")
    assert "Traceback" not in capfd.readouterr().err


def test_idle_connections_end(server, monkeypatch):
    monkeypatch.setattr("vispe.segment.live.paint.server._Handler.timeout", 0.2)
    assert raw(server, b"GET / HTTP/1.1\r\nHost:") == b""
    assert raw(server, b"") == b""


def test_folders_and_pages_that_are_not_there(tmp_path, image):
    with pytest.raises(InputError, match="is a folder, but vispe paint needs an image file"):
        open_paint(tmp_path)
    with pytest.raises(InputError, match="page 3 does not exist in"):
        open_paint(image[0], page=3, features="filters")


def test_notes_on_reading_are_those_of_segment(tmp_path):
    exif = Image.Exif()
    exif[274] = 6
    path = tmp_path / "phone.jpg"
    Image.new("RGB", (40, 30)).save(path, exif=exif)
    notes = []
    paint = open_paint(path, features="filters", watch=notes.append)
    assert paint.images[0].image.pages.shape[1:3] == (30, 40)
    assert tuple(notes) == read_image(path, orientation="stored").notes
    assert (
        "phone.jpg has the orientation tag 6 (rotated by 90 degrees clockwise), which is not applied"
        in notes[0]
    )


def test_only_this_machine_and_only_with_the_token(server):
    assert server.server_address[0] == "127.0.0.1"
    assert send_request(server, "/state")[0] == 200
    for path in ("/", "/state", "/image.png", "/paint.js", "/style.css"):
        for token in ("", "x", server.token[:-1]):
            status, _, body = send_request(server, path, token=token)
            assert status == 403
            assert server.token.encode() not in body
    for headers in ({"Host": "evil.example"}, {"Host": f"evil.example:{server.server_port}"},
                    {"Origin": "http://evil.example"}, {"Origin": "null"}):  # fmt: skip
        assert send_request(server, "/state", headers=headers)[0] == 403
        assert (
            send_request(server, "/update", {"names": ["a", "b"], "strokes": []}, headers=headers)[0] == 403
        )
    host = f"127.0.0.1:{server.server_port}"
    assert send_request(server, "/state", headers={"Origin": f"http://{host}"})[0] == 200
    assert send_request(server, "/nothing")[0] == 404
    assert send_request(server, "/../session.py")[0] == 404


def test_what_is_no_address_is_refused(server, capfd):
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=30) as line:
        line.sendall(f"GET http://[ HTTP/1.1\r\nHost: 127.0.0.1:{server.server_port}\r\n\r\n".encode())
        assert b" 400 " in line.recv(4096).split(b"\r\n")[0]
    assert "Traceback" not in capfd.readouterr().err


def test_what_is_no_json_is_refused(server):
    assert send_request(server, "/update", {"a": 1}, headers={"Content-Type": "text/plain"})[0] == 415
    assert send_request(server, "/update", [1])[0] == 400
    status, _, body = send_request(server, "/update", {"names": ["a", "b"], "strokes": [{"class": 9}]})
    assert status == 422
    assert "scribble 0 has class=9" in json.loads(body)["error"]
    assert send_request(server, "/update", {}, headers={"Content-Length": str(1 << 40)})[0] == 413


def test_nothing_foreign_is_fetched(server):
    status, headers, page = send_request(server, "/")
    assert status == 200
    assert "default-src 'self'" in headers["Content-Security-Policy"]
    assert b"TOKEN" not in page
    for path in ("/", "/paint.js", "/style.css"):
        assert b"http://" not in send_request(server, path)[2]
        assert b"https://" not in send_request(server, path)[2]
    with Image.open(io.BytesIO(send_request(server, "/image.png")[2])) as displayed:
        state = json.loads(send_request(server, "/state")[2])
        assert displayed.size == (state["width"], state["height"])


def test_large_images_are_shown_smaller(tmp_path):
    Image.fromarray(np.zeros((40, 5000), np.uint8) + np.arange(5000, dtype=np.uint8)).save(
        tmp_path / "wide.png"
    )
    paint = open_paint(tmp_path / "wide.png", features="filters")
    with Image.open(io.BytesIO(paint.image_png())) as displayed:
        assert displayed.size == (2048, 16)


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
@pytest.mark.slow
def test_in_a_browser(server, image, tmp_path):
    paint, (x, y) = server.paint, image[1]
    with Browser(server.address) as browser:
        browser.wait("document.body && document.body.dataset.ready === 'yes'")

        def at(px, py):
            box = "canvas.getBoundingClientRect()"
            left, top, vx, vy, scale = browser.run(f"[{box}.left, {box}.top, view.x, view.y, view.scale]")
            return left + vx + (px + 0.5) * scale, top + vy + (py + 0.5) * scale

        browser.drag(at(3, 3), at(20, 3), at(40, 3))
        browser.wait("document.body.dataset.version === '1'")
        assert "at least two classes" in browser.run("find('status').textContent")
        browser.key("2")
        browser.drag(at(x, y), at(x + 1, y))
        browser.wait("document.body.dataset.version === '2'")
        assert [s.level for s in paint.images[paint.shown].strokes] == [(1,), (2,)]
        np.testing.assert_allclose(
            paint.images[paint.shown].strokes[0].points[[0, -1]], [[3, 3], [40, 3]], atol=0.6
        )
        assert browser.run("result !== null && fractions.length === 2")
        displayed = Image.open(io.BytesIO(browser.image_png()))
        assert displayed.size == (1200, 800)
        browser.key("z")
        browser.wait("document.body.dataset.version === '3'")
        assert len(paint.images[paint.shown].strokes) == 1
        browser.key("y")
        browser.wait("document.body.dataset.version === '4'")
        assert len(paint.images[paint.shown].strokes) == 2
        # the eraser takes away the whole stroke that it touches
        browser.key("e")
        browser.drag(at(20, 3), at(21, 4))
        browser.wait("document.body.dataset.version === '5'")
        assert [s.level for s in paint.images[paint.shown].strokes] == [(2,)]
        browser.key("z")
        browser.wait("document.body.dataset.version === '6'")
        # a pen that leaves the image lifts: nothing is painted along the border
        right = paint.image.shape[1]
        browser.key("b")
        browser.drag(at(right - 6, 8), at(right + 9, 9), at(right + 9, 30), at(right - 6, 31))
        browser.wait("document.body.dataset.version === '7'")
        assert len(paint.images[paint.shown].strokes) == 4
        assert not paint.images[paint.shown].labels()[14:26, -3:].any()
        browser.key("z")
        browser.wait("document.body.dataset.version === '8'")
        # the message of saving stays, although the images of the final result arrive after it
        browser.run(
            "var stock = load, loaded = 0, release;"
            "var gate = new Promise((open) => { release = open; });"
            "load = async (source) => { loaded += 1; if (loaded > 2) await gate; return stock(source); };"
        )
        browser.run("find('add').click()")
        browser.wait("document.body.dataset.version === '9'")
        assert paint.names == ["background", "object", "class 3"]
        browser.wait("loaded === 4")
        browser.key("s")
        browser.wait("find('status').textContent === 'saved.'")
        browser.run("release()")
        browser.wait("document.body.dataset.refined === '9'")
        assert browser.run("find('status').textContent") == "saved."
    assert (tmp_path / "a_paint/a_strokes.json").is_file()
    assert np.array_equal(np.asarray(Image.open(tmp_path / "a_paint/a_seg.png")), paint.prediction.labels)


def test_the_command_ends_with_control_c(image, tmp_path):
    """It prints its address, serves, and in the end names what was not saved."""
    words = [
        "paint",
        str(image[0]),
        "--features",
        "filters",
        "--no-browser",
        "--json",
        "-o",
        str(tmp_path / "p"),
    ]
    process = subprocess.Popen(
        [sys.executable, "-m", "vispe", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # shells ignore it in background jobs
    )  # fmt: skip
    try:
        facts = json.loads(process.stdout.readline())
        assert facts["out"] == str(tmp_path / "p")
        actual = urlsplit(facts["address"])
        connection = http.client.HTTPConnection(actual.hostname, actual.port, timeout=60)
        body = json.dumps({"names": ["a", "b"], "strokes": strokes_of(image[1])[:1]})
        connection.request("POST", f"/update?{actual.query}", body, {"Content-Type": "application/json"})
        assert json.loads(connection.getresponse().read())["ready"] is False
        connection.close()
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0
    assert f"not saved to {tmp_path / 'p'}: 1 stroke" in said
