"""Paint window: results, saved files, access control, and use in a browser."""

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

SCRIBBLES = [
    {"class": 1, "width": 3, "points": [[2, 2], [30, 3], [44.2, 2.7]]},
    {"class": 2, "width": 5, "points": [[20, 20]]},
]


@pytest.fixture
def image(tmp_path):
    grey, _, scribbles = scene(seed=0)
    Image.fromarray(grey).save(tmp_path / "a.png")
    y, x = np.argwhere(scribbles == 2)[0]
    return tmp_path / "a.png", (int(x), int(y))


def scribbles_on(position):
    return [SCRIBBLES[0], {**SCRIBBLES[1], "points": [list(position)]}]


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
    """Send a request and return status, headers and body of the response."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)
    body = None if content is None else json.dumps(content)
    kind = {"Content-Type": "application/json"} if body else {}
    requested = f"{path}?token={server.token if token is None else token}"
    connection.request("POST" if body else "GET", requested, body, {**kind, **dict(headers)})
    actual = connection.getresponse()
    response = actual.status, dict(actual.getheaders()), actual.read()
    connection.close()
    return response


def test_results_equal_those_of_live_and_of_segment(image, paint, tmp_path):
    path, position = image
    scribbles = scribbles_on(position)
    actual = paint.update({"names": ["ground", "disc"], "strokes": scribbles})
    assert actual["ready"]
    config = paint.live._features.config
    live = Live(paint.image, features=config, classifier="ensemble", names=["ground", "disc"])
    expected = live.update(paint.images[paint.shown].labels())
    assert np.array_equal(paint.prediction.labels, expected.labels)
    assert paint.save() == ["a_strokes.json", "model.vispe", "a_seg.png"]
    out = tmp_path / "a_paint"
    assert main(["segment", str(path), "--labels", str(out / "a_strokes.json"), "--classes", "ground,disc",
                 "--features", "filters", "-o", str(tmp_path / "o")]) == 0  # fmt: skip
    saved, expected_labels = (
        np.asarray(Image.open(p)) for p in (out / "a_seg.png", tmp_path / "o/a_seg.png")
    )
    assert np.array_equal(saved, expected_labels)
    assert main(["apply", str(out / "model.vispe"), str(path), "-o", str(tmp_path / "again")]) == 0
    assert np.array_equal(saved, np.asarray(Image.open(tmp_path / "again/a_seg.png")))
    with Image.open(io.BytesIO(base64.b64decode(actual["labels"]))) as displayed:
        assert np.array_equal(np.asarray(displayed), saved)
        assert displayed.info["transparency"] == 0


def test_preview_is_logistic_and_the_result_is_the_ensemble(image, paint):
    content = {"names": ["ground", "disc"], "strokes": scribbles_on(image[1])}
    preview = paint.update({**content, "preview": True})
    assert preview["preview"]
    assert paint.live.model.classifier.kind == "logistic"
    assert "calibration" not in paint.live.model.notes
    options = {"features": paint.live._features.config, "names": ["ground", "disc"]}
    logistic = Live(paint.image, classifier="logistic", **options)
    assert np.array_equal(paint.prediction.labels, logistic.update(paint.images[paint.shown].labels()).labels)
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
    without_preview = open_paint(image[0], features="filters", classifier="logistic")
    assert not without_preview.update({**content, "preview": True})["preview"]


def test_a_newer_request_interrupts_a_result(image, paint, monkeypatch):
    content = {"names": ["ground", "disc"], "strokes": scribbles_on(image[1])}
    predict, responses = paint.live.predict, []

    def predict_with_new_request(page=None, step=None):
        if step is not None and not responses:
            responses.append(
                threading.Thread(target=lambda: responses.append(paint.update({**content, "preview": True})))
            )
            responses[0].start()
            while paint._newest is first[0]:
                time.sleep(0.01)
        return predict(page, step)

    first = []
    fit = paint.live.fit
    monkeypatch.setattr(paint.live, "fit", lambda preview=False: first.append(paint._newest) or fit(preview))
    monkeypatch.setattr(paint.live, "predict", predict_with_new_request)
    assert paint.update(content) == {"ready": False, "why": "another request arrived."}
    responses[0].join()
    assert responses[1]["ready"]
    assert responses[1]["preview"]
    assert paint.prediction is not None


def test_scribbles_are_drawn_in_order_and_can_be_undone(paint, image):
    scribbles = scribbles_on(image[1])
    first = paint.update({"names": ["a", "b"], "strokes": scribbles})
    overlapping = [*scribbles, {"class": 2, "width": 9, "points": [[2, 2], [30, 2]]}]
    second = paint.update({"names": ["a", "b"], "strokes": overlapping})
    assert second["labels"] != first["labels"]
    assert (paint.images[paint.shown].labels()[2, 5:30] == 2).all()
    covering = [*scribbles, {"class": 2, "width": 9, "points": [[2, 2], [48, 2]]}]
    assert not paint.update({"names": ["a", "b"], "strokes": covering})["ready"]
    assert paint.update({"names": ["a", "b"], "strokes": scribbles}) == first
    first_only = paint.update({"names": ["a", "b"], "strokes": scribbles[:1]})
    assert first_only == {"ready": False, "why": "paint scribbles of at least two classes."}
    assert paint.prediction is None


def test_saving_overwrites_only_its_own_files(paint, image, tmp_path):
    with pytest.raises(InputError, match=r"nothing to save yet\. Paint a scribble first"):
        paint.save()
    paint.update({"names": ["a", "b"], "strokes": scribbles_on(image[1])[:1]})
    assert not paint.saved
    assert paint.save() == ["a_strokes.json"]
    assert paint.saved
    (tmp_path / "a_paint/model.vispe").write_text("mine")
    paint.update({"names": ["a", "b"], "strokes": scribbles_on(image[1])})
    with pytest.raises(InputError, match=r"model\.vispe"):
        paint.save()
    assert (tmp_path / "a_paint/model.vispe").read_text() == "mine"
    (tmp_path / "a_paint/model.vispe").unlink()
    assert len(paint.save()) == len(paint.save()) == 3  # its own files may be renewed


NAMES = [None, "ab", ["a"], ["a", "a"], ["a", " "], ["a", 1], [str(i) for i in range(30)]]
NAMES += [["a" * 201, "b"], ["a", "\u202eb"], ["a", "b\x07"]]


@cases("names", NAMES)
def test_invalid_names_raise(names):
    with pytest.raises(OptionError, match="names="):
        checked_names(names)


@cases(
    "stroke",
    [None, 3, {}, {"class": 0, "width": 1, "points": [[1, 1]]}, {"class": 3, "width": 1, "points": [[1, 1]]},
     {"class": 1, "width": 0, "points": [[1, 1]]}, {"class": 1, "width": 1, "points": []},
     {"class": 1, "width": 1, "points": [["x", 1]]}, {"class": 1, "width": 1, "points": [[float("nan"), 1]]},
     {"class": True, "width": 1, "points": [[1, 1]]}],
)  # fmt: skip
def test_invalid_scribbles_raise(stroke):
    with pytest.raises(InputError, match="Paint it again"):
        checked_strokes([stroke], 2, 0, (9, 9))


def test_points_outside_the_image_raise():
    for point in ([-5, 4], [6.6, 4], [3, 8.51]):
        with pytest.raises(InputError, match="scribble 0 has points outside the image"):
            checked_strokes([{"class": 1, "width": 1, "points": [point]}], 2, 0, (9, 7))
    actual = checked_strokes([{"class": 1, "width": 1, "points": [[-0.49, 8.49]]}], 2, 0, (9, 7))
    assert actual[0].points.tolist() == [[-0.49, 8.49]]


def test_saved_points_keep_their_precision(paint, image, tmp_path):
    """Points near the border of two pixels: the file stores as many digits as the result was computed from."""
    rng = np.random.default_rng(0)
    points = np.stack([rng.integers(2, 45, 40), rng.integers(2, 6, 40)], 1) + rng.choice(
        [0.497, 0.4951, -0.4996], (40, 2)
    )
    scribbles = [{"class": 1, "width": 1, "points": points.tolist()}, scribbles_on(image[1])[1]]
    paint.update({"names": ["ground", "disc"], "strokes": scribbles})
    paint.save()
    out = tmp_path / "a_paint"
    assert main(["segment", str(image[0]), "--labels", str(out / "a_strokes.json"), "--classes", "ground,disc",
                 "--features", "filters", "-o", str(tmp_path / "o")]) == 0  # fmt: skip
    saved, expected_labels = (
        np.asarray(Image.open(p)) for p in (out / "a_seg.png", tmp_path / "o/a_seg.png")
    )
    assert np.array_equal(saved, expected_labels)


def test_saving_uses_the_newest_scribbles(paint, image, tmp_path):
    scribbles = scribbles_on(image[1])
    paint.update({"names": ["a", "b"], "strokes": scribbles[:1]})
    assert len(paint.save({"names": ["a", "b"], "strokes": scribbles})) == 3
    assert len(json.loads((tmp_path / "a_paint/a_strokes.json").read_text())) == 2
    assert paint.saved
    # the window sends its scribbles again when it is opened again
    paint.update({"names": ["a", "b"], "strokes": scribbles})
    assert paint.saved
    paint.update({"names": ["a", "c"], "strokes": scribbles})
    assert not paint.saved


@pytest.mark.parametrize("step", ["save_model", "write_labels"])
def test_failed_saves_can_be_repeated(paint, image, monkeypatch, step):
    scribbles = scribbles_on(image[1])
    paint.update({"names": ["a", "b"], "strokes": scribbles})

    def fail(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(f"vispe.segment.live.paint.saved_files.{step}", fail)
        with pytest.raises(OSError, match="No space"):
            paint.save()
    assert len(paint.save()) == 3
    assert len(paint.save()) == 3


@pytest.mark.parametrize("path", ["/update", "/save"])
def test_windows_do_not_overwrite_scribbles_of_each_other(server, image, path):
    scribbles = scribbles_on(image[1])
    names = ["a", "b"]
    first, second = ({"names": names, "window": w, "revision": 0, "strokes": scribbles[:1]} for w in "12")
    assert send_request(server, "/update", first)[0] == 200
    # before the first response is read
    assert send_request(server, "/update", {**first, "strokes": scribbles})[0] == 200
    status, _, body = send_request(server, path, second)
    assert status == 409
    assert "changed in another window. Reload this page" in json.loads(body)["error"]
    state = json.loads(send_request(server, "/state")[2])
    assert len(state["strokes"]) == 2
    # after a reload the second window is current and the first one is stale
    merged = {**second, "revision": state["revision"], "strokes": scribbles[1:]}
    assert send_request(server, "/update", merged)[0] == 200
    assert send_request(server, path, first)[0] == 409
    assert len(json.loads(send_request(server, "/state")[2])["strokes"]) == 1


def send_raw(server, request):
    """Send raw bytes and return the response until the server closes the connection."""
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=30) as connection:
        connection.sendall(request)
        chunks = []
        while chunk := connection.recv(4096):
            chunks.append(chunk)
    return b"".join(chunks)


@pytest.mark.parametrize("length", ["²", "+5", "-1", "1e3", "", "٣"])
def test_invalid_content_lengths_are_rejected(server, capfd, length):
    request_line = f"POST /update?token={server.token} HTTP/1.1\r\nHost: 127.0.0.1:{server.server_port}\r\n"
    headers = f"Content-Type: application/json\r\nContent-Length: {length}\r\n\r\n"
    response = send_raw(server, request_line.encode() + headers.encode("utf-8"))
    assert response.startswith(b"HTTP/1.1 400 ")
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize("body", ["[" * 100_000, '{"names":' * 50_000, "[1]", '"a"', "{", "\udcff"])
def test_bodies_that_are_not_json_objects_are_rejected(server, capfd, body):
    data = body.encode("utf-8", "surrogateescape")
    request_line = f"POST /update?token={server.token} HTTP/1.1\r\nHost: 127.0.0.1:{server.server_port}\r\n"
    headers = f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    response = send_raw(server, (request_line + headers).encode() + data)
    assert response.startswith(b"HTTP/1.1 400 ")
    assert "Traceback" not in capfd.readouterr().err


def test_idle_connections_are_closed(server, monkeypatch):
    monkeypatch.setattr("vispe.segment.live.paint.server._Handler.timeout", 0.2)
    assert send_raw(server, b"GET / HTTP/1.1\r\nHost:") == b""
    assert send_raw(server, b"") == b""


def test_folders_and_missing_pages_raise(tmp_path, image):
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


def test_server_accepts_only_localhost_with_the_token(server):
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


def test_invalid_urls_are_rejected(server, capfd):
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=30) as connection:
        connection.sendall(f"GET http://[ HTTP/1.1\r\nHost: 127.0.0.1:{server.server_port}\r\n\r\n".encode())
        assert b" 400 " in connection.recv(4096).split(b"\r\n")[0]
    assert "Traceback" not in capfd.readouterr().err


def test_requests_without_valid_json_are_rejected(server):
    assert send_request(server, "/update", {"a": 1}, headers={"Content-Type": "text/plain"})[0] == 415
    assert send_request(server, "/update", [1])[0] == 400
    status, _, body = send_request(server, "/update", {"names": ["a", "b"], "strokes": [{"class": 9}]})
    assert status == 422
    assert "scribble 0 has class=9" in json.loads(body)["error"]
    assert send_request(server, "/update", {}, headers={"Content-Length": str(1 << 40)})[0] == 413


def test_no_external_resource_is_loaded(server):
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


def test_large_images_are_displayed_downscaled(tmp_path):
    Image.fromarray(np.zeros((40, 5000), np.uint8) + np.arange(5000, dtype=np.uint8)).save(
        tmp_path / "wide.png"
    )
    paint = open_paint(tmp_path / "wide.png", features="filters")
    with Image.open(io.BytesIO(paint.image_png())) as displayed:
        assert displayed.size == (2048, 16)


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
@pytest.mark.slow
def test_painting_in_a_browser(server, image, tmp_path):
    paint, (x, y) = server.paint, image[1]
    with Browser(server.address) as browser:
        browser.wait("document.body && document.body.dataset.ready === 'yes'")

        def to_window(px, py):
            box = "canvas.getBoundingClientRect()"
            left, top, vx, vy, scale = browser.run(f"[{box}.left, {box}.top, view.x, view.y, view.scale]")
            return left + vx + (px + 0.5) * scale, top + vy + (py + 0.5) * scale

        browser.drag(to_window(3, 3), to_window(20, 3), to_window(40, 3))
        browser.wait("document.body.dataset.version === '1'")
        assert "at least two classes" in browser.run("find('status').textContent")
        browser.key("2")
        browser.drag(to_window(x, y), to_window(x + 1, y))
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
        # the eraser removes the whole scribble that it touches
        browser.key("e")
        browser.drag(to_window(20, 3), to_window(21, 4))
        browser.wait("document.body.dataset.version === '5'")
        assert [s.level for s in paint.images[paint.shown].strokes] == [(2,)]
        browser.key("z")
        browser.wait("document.body.dataset.version === '6'")
        # leaving the image ends the scribble: nothing is painted along the border
        right = paint.image.shape[1]
        browser.key("b")
        browser.drag(
            to_window(right - 6, 8),
            to_window(right + 9, 9),
            to_window(right + 9, 30),
            to_window(right - 6, 31),
        )
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


def test_paint_command_ends_with_control_c(image, tmp_path):
    """The command prints its address, serves, and reports unsaved scribbles at the end."""
    argv = [
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
        [sys.executable, "-m", "vispe", *argv], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # shells ignore it in background jobs
    )  # fmt: skip
    try:
        output = json.loads(process.stdout.readline())
        assert output["out"] == str(tmp_path / "p")
        actual = urlsplit(output["address"])
        connection = http.client.HTTPConnection(actual.hostname, actual.port, timeout=60)
        body = json.dumps({"names": ["a", "b"], "strokes": scribbles_on(image[1])[:1]})
        connection.request("POST", f"/update?{actual.query}", body, {"Content-Type": "application/json"})
        assert json.loads(connection.getresponse().read())["ready"] is False
        connection.close()
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0
    assert f"not saved to {tmp_path / 'p'}: 1 stroke" in stderr
