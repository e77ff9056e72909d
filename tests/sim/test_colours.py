"""Colours: the same in every picture, distinct for colour-blind readers, text readable on each."""

import re
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

import pipeproof.views.html
from pipeproof.views.svg import COLLECTIVE, IDLE, KIND_COLOURS, channels, is_dark
from tests.sim.test_svg import picture

CSS = (Path(pipeproof.views.html.__file__).parent / "page" / "page.css").read_text()


def test_the_page_for_a_browser_has_the_same():
    named = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", CSS.partition("@media")[0]))
    for kind, (full, pale) in KIND_COLOURS.items():
        assert (named[kind.value], named[f"{kind.value}-pale"]) == (full, pale)
    assert (named["collective"], named["lane"]) == (COLLECTIVE, IDLE)


def test_pictures_of_schedules_have_the_same():
    style = picture("0F0 0B0")
    for kind, pair in KIND_COLOURS.items():
        for number, colour in enumerate(pair):
            assert f".{kind.value}{number}{{fill:{colour}}}" in style


def linear(colour):
    share = np.array(channels(colour)) / 255
    return np.where(share <= 0.04045, share / 12.92, ((share + 0.055) / 1.055) ** 2.4)


@pytest.mark.parametrize("colour", [c for pair in KIND_COLOURS.values() for c in pair])
def test_text_can_be_read(colour):
    """WCAG's least contrast for large text and graphics is 3; 4.5 for small text."""
    luminance = linear(colour) @ [0.2126, 0.7152, 0.0722]
    contrast = 1.05 / (luminance + 0.05) if is_dark(colour) else (luminance + 0.05) / (0.0056 + 0.05)
    assert contrast >= 4.5


SEEN = {
    "all": np.eye(3),
    # Machado, Oliveira, Fernandes 2009, severity 1, on linear RGB
    "protan": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deutan": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritan": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}
TO_XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])


def lab(colour, seen):
    xyz = TO_XYZ @ np.clip(np.array(SEEN[seen]) @ linear(colour), 0, 1) / [0.9505, 1, 1.089]
    f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize("seen", SEEN)
def test_kinds_and_idle_time_can_be_told_apart(seen):
    """By CIE 1976 distance; about 2 is just noticed."""
    colours = [pair[0] for pair in KIND_COLOURS.values()] + [IDLE]
    assert min(np.linalg.norm(lab(a, seen) - lab(b, seen)) for a, b in combinations(colours, 2)) > 18
    for full, pale in KIND_COLOURS.values():
        assert np.linalg.norm(lab(full, seen) - lab(pale, seen)) > 18
