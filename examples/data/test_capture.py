#!/usr/bin/env python3
"""Tests of capture.py that need no model, only NumPy. Exit status 77 means: NumPy is missing."""

from __future__ import annotations

import contextlib
import io
import json
import struct
import sys
import tempfile
import unittest
from pathlib import Path
from types import SimpleNamespace

try:
    import numpy as np
except ImportError:
    if __name__ == "__main__":
        print("skipped: NumPy is not installed", file=sys.stderr)
        sys.exit(77)
    raise unittest.SkipTest("NumPy is not installed") from None

sys.path.insert(0, str(Path(__file__).resolve().parent))
import capture
import study_texts

THETA = 100000.0


def normal(*shape: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def read_safetensors(path: Path) -> tuple[dict, dict[str, np.ndarray], int]:
    """Metadata, tensors and the file offset of the data; written apart from the writer."""
    blob = path.read_bytes()
    (length,) = struct.unpack_from("<Q", blob)
    header = json.loads(blob[8 : 8 + length])
    data = blob[8 + length :]
    metadata = header.pop("__metadata__")
    tensors = {}
    types = {"F16": "<f2", "F32": "<f4", "I32": "<i4"}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        flat = np.frombuffer(data[begin:end], types[entry["dtype"]])
        tensors[name] = flat.reshape(entry["shape"])
    return metadata, tensors, 8 + length


class RopeTest(unittest.TestCase):
    def test_keeps_the_norm_of_each_pair(self) -> None:
        x = normal(50, 3, 64)
        y = capture.rope(x, np.arange(4000, 4050), THETA)
        before = x[..., 0::2] ** 2 + x[..., 1::2] ** 2
        after = y[..., 0::2] ** 2 + y[..., 1::2] ** 2
        np.testing.assert_allclose(after, before, rtol=1e-4, atol=1e-5)

    def test_position_zero_changes_nothing(self) -> None:
        x = normal(1, 2, 64)
        np.testing.assert_array_equal(capture.rope(x, np.array([0]), THETA), x)

    def test_score_depends_on_the_distance_only(self) -> None:
        q, k = normal(1, 1, 64, seed=2), normal(1, 1, 64, seed=3)

        def score(q_position: int, k_position: int) -> float:
            rotated_q = capture.rope(q, np.array([q_position]), THETA)
            rotated_k = capture.rope(k, np.array([k_position]), THETA)
            return float((rotated_q * rotated_k).sum())

        self.assertAlmostEqual(score(37, 0), score(8000, 7963), delta=1e-4)
        self.assertGreater(abs(score(37, 0) - score(38, 0)), 1e-2)

    def test_first_pair_turns_by_one_radian_a_token(self) -> None:
        x = np.zeros((1, 1, 64), np.float32)
        x[0, 0, 0] = 1.0
        y = capture.rope(x, np.array([1]), THETA)[0, 0]
        np.testing.assert_allclose(y[:2], [np.cos(1.0), np.sin(1.0)], rtol=1e-6)
        self.assertFalse(y[2:].any())


class AttentionTest(unittest.TestCase):
    def setUp(self) -> None:
        self.q = normal(37, 6, 8, seed=4)
        self.k, self.v = normal(37, 2, 8, seed=5), normal(37, 2, 8, seed=6)

    def test_equals_a_naive_loop(self) -> None:
        q, k, v = (x.astype(np.float64) for x in (self.q, self.k, self.v))
        expected = np.zeros_like(q)
        for token in range(37):
            for head in range(6):
                shared = head // 3  # heads 0..2 read KV head 0, heads 3..5 read KV head 1
                scores = [q[token, head] @ k[j, shared] / np.sqrt(8) for j in range(token + 1)]
                weights = np.exp(scores) / np.exp(scores).sum()
                for j, weight in enumerate(weights):
                    expected[token, head] += weight * v[j, shared]
        out = capture.causal_attention(self.q, self.k, self.v, chunk=64)
        np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-5)

    def test_chunks_equal_one_block(self) -> None:
        whole = capture.causal_attention(self.q, self.k, self.v, chunk=37)
        for chunk in (1, 5, 36, 1000):
            out = capture.causal_attention(self.q, self.k, self.v, chunk=chunk)
            np.testing.assert_allclose(out, whole, rtol=1e-4, atol=1e-6)

    def test_weights_are_causal_and_sum_to_one(self) -> None:
        weights = capture.attention_weights(self.q[30:], self.k, 30)
        np.testing.assert_allclose(weights.sum(axis=-1), 1.0, rtol=1e-5)
        self.assertEqual(weights[:, 0, 31:].max(), 0.0)
        self.assertGreater(weights[:, 0, 30].min(), 0.0)

    def test_a_step_redone_from_f16_is_near(self) -> None:
        weights = capture.attention_weights(self.q[-1:], self.k, 36)
        out = capture.apply_weights(weights, self.v)[0]
        k, v = self.k.astype(np.float16), self.v.astype(np.float16)
        errors = capture.compare_step(k, v, self.q[-1], weights[:, 0], out)
        self.assertLess(max(errors), 5e-3)
        wrong = capture.compare_step(k[::-1], v, self.q[-1], weights[:, 0], out)
        self.assertGreater(max(wrong), 5e-2)


class TinyModel:
    """Two layers of random weights, as forward wants them."""

    def __init__(self) -> None:
        self.config = capture.LlamaConfig(
            n_layers=2, hidden_size=12, heads=2, kv_heads=1, head_dim=6, context=64,
            rope_theta=THETA, epsilon=1e-5,
        )  # fmt: skip
        shapes = {
            "attn_q": (12, 12), "attn_k": (6, 12), "attn_v": (6, 12), "attn_output": (12, 12),
            "ffn_gate": (20, 12), "ffn_up": (20, 12), "ffn_down": (12, 20),
            "attn_norm": (12,), "ffn_norm": (12,),
        }  # fmt: skip
        self.weights = {"token_embd.weight": normal(9, 12), "output_norm.weight": normal(12)}
        for layer in range(2):
            for seed, (part, shape) in enumerate(shapes.items()):
                self.weights[f"blk.{layer}.{part}.weight"] = normal(*shape, seed=10 * layer + seed)

    def weight(self, name: str) -> np.ndarray:
        return self.weights[name]


class ForwardTest(unittest.TestCase):
    def run_forward(self, **options: int) -> list[capture.LayerState]:
        states: list[capture.LayerState] = []
        ids = np.array([3, 1, 4, 1, 5], np.int32)
        capture.forward(TinyModel(), ids, lambda _, state: states.append(state), **options)
        return states

    def test_predicted_queries_are_those_of_the_input_before(self) -> None:
        model = TinyModel()
        states = self.run_forward(predict_from=2)
        self.assertIsNone(states[0].predicted_q)
        before = model.weight("token_embd.weight")[[4, 1, 5]]  # what layer 0 reads
        y = capture.rms_norm(before, model.weight("blk.1.attn_norm.weight"), 1e-5)
        q = (y @ model.weight("blk.1.attn_q.weight").T).reshape(3, 2, 6)
        expected = capture.rope(q, np.arange(2, 5), THETA)
        np.testing.assert_allclose(states[1].predicted_q, expected, rtol=1e-5, atol=1e-6)
        self.assertGreater(np.abs(states[1].q[2:] - expected).max(), 1e-3)

    def test_prediction_changes_nothing_else(self) -> None:
        for with_it, without in zip(self.run_forward(predict_from=2), self.run_forward()):
            self.assertIsNone(without.predicted_q)
            for name in ("q", "k", "v", "out"):
                np.testing.assert_array_equal(getattr(with_it, name), getattr(without, name))


class StudyTextsTest(unittest.TestCase):
    def test_made_again_when_anything_changed(self) -> None:
        text = study_texts.TEXTS[0]
        stamp = study_texts.stamp_of(text, b"words", 128)
        self.assertEqual(stamp, study_texts.stamp_of(text, b"words", 128))
        others = {
            study_texts.stamp_of(text, b"other words", 128),
            study_texts.stamp_of(text, b"words", 64),
            study_texts.stamp_of(text._replace(prompt=64), b"words", 128),
        }
        self.assertNotIn(stamp, others)
        self.assertEqual(len(others), 3)
        with tempfile.TemporaryDirectory() as folder:
            made = Path(folder) / "x.safetensors"
            self.assertFalse(study_texts.is_made(made, stamp))
            made.write_bytes(b"")
            self.assertFalse(study_texts.is_made(made, stamp))
            made.with_suffix(".stamp").write_text(stamp, encoding="utf-8")
            self.assertTrue(study_texts.is_made(made, stamp))
            self.assertFalse(study_texts.is_made(made, "another"))

    def test_texts_are_long_enough_to_be_texts(self) -> None:
        for source in {text.source for text in study_texts.TEXTS}:
            self.assertGreater(len(study_texts.text_of(source)), 30_000, source)
        with self.assertRaises(ValueError):
            study_texts.text_of("nothing")

    def test_failures_are_named_and_the_others_run(self) -> None:
        commands = [(str(code), [sys.executable, "-c", f"exit({code})"]) for code in (0, 3, 0, 4)]
        self.assertEqual(sorted(study_texts.run(commands, 2)), ["3", "4"])


class SparsityTest(unittest.TestCase):
    def test_keys_for_share(self) -> None:
        rows = np.array([[0.1, 0.6, 0.3], [1.0, 0.0, 0.0]], np.float32)
        self.assertEqual(capture.keys_for_share(rows, 0.5).tolist(), [1, 1])
        self.assertEqual(capture.keys_for_share(rows, 0.85).tolist(), [2, 1])
        self.assertEqual(capture.keys_for_share(rows, 0.95).tolist(), [3, 1])

    def test_even_attention(self) -> None:
        weights = np.full((2, 1, 200), 1 / 200, np.float32)
        measured = capture.measure_sparsity(weights, 199)
        self.assertAlmostEqual(measured.keys_for_90, 180, delta=1)
        self.assertAlmostEqual(measured.first_weight, 1 / 200, places=5)
        self.assertAlmostEqual(measured.recent_weight, 64 / 200, places=5)
        self.assertAlmostEqual(measured.older_need, 0.9 * 135, delta=1)


class TokenizerTest(unittest.TestCase):
    def setUp(self) -> None:
        merges = ["t h", "th e", "Ġ the", "Ġ Ġ"]
        tokens = [*capture.byte_alphabet(), *(merge.replace(" ", "") for merge in merges)]
        self.tokens = tokens
        self.tokenizer = capture.Tokenizer(tokens, merges)

    def pieces(self, text: str) -> list[str]:
        return [self.tokens[index] for index in self.tokenizer.encode(text)]

    def test_round_trip(self) -> None:
        for text in ("", "the  end\n\n\tof 2007's\r\n", "naïve § 5 ½ 東京 🙂", "\x00\x1f_\u3000"):
            self.assertEqual(self.tokenizer.decode(self.tokenizer.encode(text)), text)

    def test_merges_in_order_of_rank(self) -> None:
        self.assertEqual(self.pieces("the the"), ["the", "Ġthe"])
        self.assertEqual(self.pieces("thth"), ["th", "th"])
        self.assertEqual(self.pieces("   the"), ["ĠĠ", "Ġthe"])

    def test_alphabet_has_256_different_printable_characters(self) -> None:
        alphabet = capture.byte_alphabet()
        self.assertEqual(len(set(alphabet)), 256)
        self.assertTrue(all(char.isprintable() for char in alphabet))
        self.assertEqual(alphabet[ord(" ")], "Ġ")

    def test_byte_without_a_token(self) -> None:
        tokenizer = capture.Tokenizer(["a"], [])
        with self.assertRaisesRegex(capture.CaptureError, "no token for 'b'"):
            tokenizer.encode("ab")

    def test_split(self) -> None:
        split = capture.PreTokenizer().split
        cases = {
            "in 2007, we": ["in", " ", "2", "0", "0", "7", ",", " we"],
            "it's  a\n  b": ["it", "'s", " ", " a", "\n ", " b"],
            "a  1": ["a", "  ", "1"],
            "x²½y": ["x", "²", "½", "y"],
            "(naïve)_!": ["(", "naïve", ")_!"],
            "end \n": ["end", " \n"],
        }
        for text, expected in cases.items():
            self.assertEqual(list(split(text)), expected)


class LossTest(unittest.TestCase):
    def test_cross_entropy(self) -> None:
        output = np.eye(4, dtype=np.float32)
        hidden = np.zeros((3, 4), np.float32)
        hidden[1, 2] = 5.0
        losses = capture.next_token_losses(hidden, output, np.array([0, 1, 2], np.int32))
        sure = np.log(np.exp(5.0) + 3.0) - 5.0
        np.testing.assert_allclose(losses, [np.log(4.0), sure], rtol=1e-5)


class SafetensorsTest(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.path = Path(folder.name) / "x.safetensors"

    def test_read_back(self) -> None:
        tensors = {
            "layer.8.k": normal(8, 3, 64).astype(np.float16),
            "layer.8.q": normal(2, 9, 64),
            "token_ids": np.arange(7, dtype=np.int32),
        }
        for width in range(70):  # every length of the header against the padding
            metadata = {"model": "m" * width}
            capture.write_safetensors(self.path, tensors, metadata)
            read_metadata, read_tensors, data_begin = read_safetensors(self.path)
            self.assertEqual(read_metadata, metadata)
            self.assertEqual(data_begin % 64, 0)
            self.assertEqual(list(read_tensors), list(tensors))
            for name, tensor in tensors.items():
                self.assertEqual(read_tensors[name].dtype, tensor.dtype)
                np.testing.assert_array_equal(read_tensors[name], tensor)

    def test_refuses_an_unaligned_offset(self) -> None:
        odd = {"a": np.zeros(3, np.int32), "b": np.zeros(4, np.int32)}
        with self.assertRaisesRegex(ValueError, "b would begin at offset 12"):
            capture.write_safetensors(self.path, odd, {})

    def test_f16_overflow(self) -> None:
        with self.assertRaisesRegex(capture.CaptureError, "beyond the range of F16"):
            capture.to_f16(np.array([7e4], np.float32), "k")


class InputTest(unittest.TestCase):
    def test_layers(self) -> None:
        self.assertEqual(capture.parse_layers("20,8,8", 30), [8, 20])
        self.assertEqual(capture.parse_layers("all", 3), [0, 1, 2])
        for text in ("", "a", "30", "-1,2"):
            with self.assertRaises(capture.CaptureError):
                capture.parse_layers(text, 30)

    def test_missing_text(self) -> None:
        with self.assertRaisesRegex(capture.CaptureError, "no text file"):
            capture.read_text(Path("no-such-file.txt"))

    def test_too_short_a_text_names_both_numbers(self) -> None:
        config = SimpleNamespace(n_layers=30, context=8192)
        tokenizer = capture.Tokenizer(capture.byte_alphabet(), [])
        model = SimpleNamespace(config=config, tokenizer=lambda: tokenizer)
        with tempfile.TemporaryDirectory() as folder:
            text = Path(folder) / "short.txt"
            text.write_text("abc", encoding="utf-8")
            argv = ["--text", str(text), "--prompt", "4", "--steps", "2"]
            arguments = capture.parse_arguments(argv)
            original = capture.GgufModel
            self.addCleanup(setattr, capture, "GgufModel", original)
            capture.GgufModel = lambda path: model
            expected = "short.txt has 3 tokens; 4 \\+ 2 = 6 are needed"
            with self.assertRaisesRegex(capture.CaptureError, expected):
                capture.capture(arguments, capture.ModelSource(Path("m.gguf"), "none"))

    def test_main_reports_without_a_traceback(self) -> None:
        errors = io.StringIO()
        with contextlib.redirect_stderr(errors):
            status = capture.main(["--wheel", "no-such.whl"])
        self.assertEqual(status, 2)
        self.assertEqual(errors.getvalue(), "error: no wheel no-such.whl\n")


if __name__ == "__main__":
    unittest.main()
