r"""Formulas of the encodings in LaTeX, converted to MathML when the site is built.

Docstrings contain them in ASCII; a page shows both. MathML needs neither scripts nor fonts of another server.
Lines of one formula are separated by a double backslash.
"""

# ruff: noqa: E501 - breaking a formula would make it harder to read
from __future__ import annotations

import re

FORMULAS = {
    "alibi": r"b_{hij} = -m_h \, |p_i - p_j|",
    "alibi2d": r"b_{hij} = -m_h \, \frac{\lVert p_i - p_j \rVert}{\mathrm{divisor}}",
    "alibi3d": r"b_{hij} = -m_h \, \frac{\lVert p_i - p_j \rVert}{\mathrm{divisor}}",
    "alibi_graph": r"b_{hij} = -m_h \, \ell(i, j)",
    "bam": r"b_{hij} = -\left( |p_j - p_i - \mu_h| + \varepsilon \right)^{\beta_h} e^{a_h}, \quad \mu_h = 2 \sinh l_h",
    "bam_ssmax": r"a_{hij} = s_h \ln n_i \left( \frac{q_i \cdot k_j}{\sqrt{d_h}} + b_{hij} \right)",
    "border": r"\left[ \sin u \omega_k, \; \cos u \omega_k \right], \quad u \in \{ y, \, h - 1 - y, \, x, \, w - 1 - x \}, "
    r"\quad \omega_k = T^{-k/K}",
    "cable": r"b_{hij} = - \sum_{m \in \mathrm{way}(i, j)} \operatorname{softplus}(w_h \cdot x_m + c_h)",
    "carope": r"f_h(x) = \frac{1}{1 + \operatorname{softplus}(w_h \cdot x + b_h)}, \quad "
    r"\theta_{tc} = \sum_{s \le t} f_h(x_s)^{c + 1}",
    "comrope_ap": r"q' = R(p) \, q, \quad k' = R(p) \, k, \quad R(p) = \exp \Big( \sum_a p_a A_a \Big)",
    "comrope_ld": r"q' = R(p) \, q, \quad k' = R(p) \, k, \quad R(p) = \exp \Big( \sum_a p_a A_a \Big), \quad "
    r"A_{aj} = \theta_{aj} \left( P_j - P_j^\top \right)",
    "cope": r"b_{hij} = q_i \cdot e_{n_{ij}}, \quad n_{ij} = \sum_m \sigma \left( \frac{q_i \cdot k_m}{\sqrt{d_h}} \right)",
    "countdown": r"\left[ \sin r \omega_i, \; \cos r \omega_i \right], \quad r = \mathrm{length} + \mathrm{offset} - t, "
    r"\quad \omega_i = T^{-i / (K - 1)}",
    "dape": r"a' = a + b + f([a, b]), \quad a_{ij} = \frac{q_i \cdot k_j}{\sqrt{d_h}}",
    "deberta": r"a_{ij} = s \left( q_i \cdot k_j + q_i \cdot K_{p_i - p_j} + k_j \cdot Q_{p_i - p_j} \right)",
    "decomposed": r"a_{ij} = s \, q_i \cdot k_j + q_i \cdot \left( R^h_{y_i - y_j} + R^w_{x_i - x_j} \right)",
    "distance_bank": r"b_{hij} = \sum_r (W x_i + c)_{hr} \, B_{r, d(i, j)}",
    "dynamic": r"x + \left[ \sin p, \; \cos p \right], \quad p = W_2 \operatorname{gelu}(W_1 x + b_1) + b_2",
    "fire": r"b_h = W_2 \operatorname{relu}(W_1 r + b_1) + b_2, \quad "
    r"r = \frac{\psi(d)}{\psi(\max(L, D)) + \varepsilon}, \quad \psi(x) = \ln(1 + |c x|)",
    "fope": r"\cos_f = C_{\cos} \cos p \omega, \quad \sin_f = C_{\sin} \sin p \omega",
    "fourier": r"\left[ \sin 2 \pi B p, \; \cos 2 \pi B p \right], \quad B \sim N(0, \sigma^2)",
    "fourier_learned": r"W_2 \operatorname{gelu}(W_1 f + b_1) + b_2, \quad "
    r"f = \frac{1}{\sqrt{F}} \left[ \cos W p, \; \sin W p \right]",
    "fox": r"b_{hij} = s \sum_{m \in \mathrm{way}(i, j)} \ln \sigma (w_h \cdot x_m + c_h)",
    "gaussian2d": r"b_{ij} = A \exp \left( - \frac{\lVert p_i - p_j \rVert^2}{2 \sigma^2} \right)",
    "gpsa": r"(1 - s_h) \operatorname{softmax} \left( \frac{q_i \cdot k_j}{\sqrt{d_h}} \right) + "
    r"s_h \operatorname{softmax} \left( w_h \cdot (\Delta x, \Delta y, \Delta x^2 + \Delta y^2) + c_h \right)",
    "grape": r"q_i \to G(p_i) \, q_i, \quad k_j \to G(p_j) \, k_j, \quad G(p) = \prod_a \exp(p_a L_a)",
    "grape_alibi": r"b_{hij} = -m_h \operatorname{softplus}(\omega_h) \left( g^q_i + g^k_j \right) \lVert p_i - p_j \rVert",
    "grape_path": r"b_{tj} = \sum_{j < l \le t} m_h \ln \sigma \left( \frac{p_t \cdot R(p_l)}{d_p} \right), \quad p = W_p x",
    "gta": r"q' = \rho(g)^{-\top} q, \quad k' = \rho(g) \, k, \quad v' = \rho(g) \, v, \quad o = \rho(g)^{-1} o'",
    "hope_hyperbolic": r"a_{ij} = s \sum_c e^{-|D| t} \left( (q_1 k_1 + q_2 k_2) \cosh D \omega_c + "
    r"(q_1 k_2 + q_2 k_1) \sinh D \omega_c \right), \quad D = p_i - p_j",
    "irpe": r"a_{hij} = s \left( q_i \cdot k_j + q_i \cdot T^k_{h, b(o)} + k_j \cdot T^q_{h, b(-o)} \right), \quad "
    r"o = p_i - p_j \\ o_i = \sum_j A_{ij} \left( v_j + T^v_{h, b(o)} \right)",
    "kerple": r"b_h = -p_h \ln(1 + a_h d) \quad \text{or} \quad b_h = -a_h d^{p_h}, \; 0 < p_h < 2",
    "legendre": r"W \left( g_s P_i(y) P_j(x) \right), \quad s = i + j \le \mathrm{degree}, \quad x, y \in [-1, 1]",
    "liere": r"q' = R(p) \, q, \quad k' = R(p) \, k, \quad R(p) = \exp \Big( \sum_a p_a \left( U_a - U_a^\top \right) \Big)",
    "lightnet": r"q' \cdot k' = \sum_c q_c k_c \cos \left( \varphi_c(p) - \varphi_c(p') \right)",
    "lookhere": r"b_{hij} = -g \, l \, m_h \, d(p_i, p_j) \text{ where head } h \text{ sees key } j, \quad -\infty \text{ elsewhere}",
    "loope": r"\left[ \sin X \omega_i, \; \cos X \omega_i \right], \quad \omega_i = T^{-2i / d}, \quad X = \mathrm{index} + \mathrm{shift}",
    "neuda": r"\Big[ x, \; \sum_{c} w_c \left[ \sin 2^i a_c, \; \cos 2^i a_c \right], \; i = 0, \ldots, L - 1 \Big]",
    "pape": r"b_{hij} = s \sum_m - a_{hm}(i) \, (u_j - u_i)^2 - b_{hm}(i) \, (u_j - u_i)",
    "path": r"a_{ij} = s \left( q_i^\top (I - \beta_i w_i w_i^\top) \cdots (I - \beta_{j+1} w_{j+1} w_{j+1}^\top) \, k_j + "
    r"g_{j+1} + \ldots + g_i \right)",
    "peg": r"y = x + \operatorname{conv}(x)",
    "pope": r"a_{ij} = \sum_c \operatorname{softplus}(q_{ic}) \operatorname{softplus}(k_{jc}) "
    r"\cos \left( (p_j - p_i) \omega_c + \operatorname{clamp}(\delta_{hc}, -2 \pi, 0) \right)",
    "positional_attention": r"a_{hij} = \frac{(W^q_h p_i + b^q_h) \cdot (W^k_h p_j + b^k_h)}{\sqrt{d_p}}",
    "psc": r"q_i \to q_i \left( 1 + \tfrac{1}{2} \tanh \left( \operatorname{silu}(q_i U_h) V_h \right) \right)",
    "ranked": r"\left[ \sin r \omega_k, \; \cos r \omega_k \right], \quad \omega_k = T^{-k / (d / 2)}",
    "rope_axial": r"\theta_{aj}(p) = p_a \, T^{-j / J}, \quad q'_j = e^{i \theta_{aj}(p)} q_j",
    "rope_dinov3": r"\theta_k = \frac{2 \pi c}{T^{k / K}}, \quad c = \frac{2 (i + \tfrac{1}{2})}{\mathrm{size}} - 1",
    "rope_field": r"\theta_f = \omega_f \cdot p, \quad \omega_f = s_f \, (\cos \alpha_f, \sin \alpha_f)",
    "rope_mixed": r"\theta_{ni}(p) = x F^x_{ni} + y F^y_{ni}, \quad q'_i = e^{i \theta_{ni}(p)} q_i",
    "rope_pp": r"a = \operatorname{Re} \sum_c z^q_c \overline{z^k_c} \quad \text{or} \quad a = \operatorname{Im} \sum_c z^q_c \overline{z^k_c}",
    "rpb": r"b_{hij} = B_{p_i - p_j, h}",
    "rpb_cpb": r"b_{hij} = 16 \, \sigma \left( W_2 \operatorname{relu} (W_1 c' + b) \right)_h, \quad "
    r"c' = \operatorname{sign}(c) \frac{\log_2(1 + |c|)}{3}, \quad c = \frac{8 \, o}{n - 1}",
    "sandwich": r"b_{hij} = \frac{1}{r_h} \left( \sum_c \cos \omega_c (p_i - p_j) - 1 \right), \quad r_h = \frac{8 h}{H}",
    "selective_rope": r"\theta_t = \tau \sum_{s \le t} \varphi_s, \quad \varphi = \operatorname{filter}(W \tilde{x})",
    "self_extend": r"D = p_i - p_j \text{ below } w, \quad "
    r"D = \lfloor p_i / g \rfloor - \lfloor p_j / g \rfloor + w - \lfloor w / g \rfloor \text{ from there on}",
    "seqpe": r"q' = p^q \odot q, \quad k' = p^k \odot k, \quad [p^q, p^k] = W_l \operatorname{encoder}(\mathrm{row}, \mathrm{column})",
    "shaw": r"a_{ij} = s \, q_i \cdot \left( k_j + r_{p_i - p_j} \right)",
    "shifted_gaussian": r"\exp \left( - \frac{(x - c_k)^2}{2 \sigma^2} \right), \quad c_k = \frac{k}{m}",
    "sincos2d": r"\left[ \sin y \omega_k, \; \cos y \omega_k, \; \sin x \omega_k, \; \cos x \omega_k \right], \quad \omega_k = T^{-k / (d / 4)}",
    "sincos3d": r"\left[ \sin z \omega_k, \; \cos z \omega_k, \; \sin y \omega_k, \; \cos y \omega_k, \; \sin x \omega_k, \; "
    r"\cos x \omega_k \right], \quad \omega_k = T^{-k / K}",
    "sincos3d_points": r"\sin a_i \text{ for even } i, \; \cos a_i \text{ for odd } i, \quad "
    r"a_i = \frac{2 \pi p}{T^{2 \lfloor i / 2 \rfloor / F}}",
    "spder": r"y = \sin(u) \sqrt{|u|}, \quad u = \omega (W x + b)",
    "ssmax": r"a_{hij} = s_h \ln n_i \, \frac{q_i \cdot k_j}{\sqrt{d_h}}",
    "string": r"q' = R(p) \, q, \quad k' = R(p) \, k, \quad R(p) = \exp \Big( \sum_a p_a \left( C_a - C_a^\top \right) \Big)",
    "t5": r"b_h = \sum_a B_{a, \operatorname{bucket}(p_{ja} - p_{ia}), h}",
    "tapa": r"a_{ij} = \frac{q_A \cdot k_A}{\sqrt{\theta d}} \cos \left( 2 \pi \, |p_i - p_j|^\alpha \, \frac{q_P \cdot k_P}{\sqrt{(1 - \theta) d}} \right)",
    "tpe2d": r"o_i = \sum_o g_o(i) \sum_j \operatorname{softmax}_j \left( \frac{R(r_o(i)) q_i \cdot R(r_o(j)) k_j}{\sqrt{d_h}} \right) v_j",
    "tra": r"a_{hij} = S_{ij} + \ln \sigma (w_h \cdot x_i + c_h) \, n_{ij}, \quad S_{ij} = \operatorname{relu} \frac{q_i \cdot k_j}{\sqrt{d_h}}",
    "transformer_xl": r"a_{ij} = s \left( (q_i + u) \cdot k_j + (q_i + v) \cdot R_{p_i - p_j} r \right)",
    "xpos": r"a_{ij} = \sum_c \zeta_c^{(p_i - p_j) / S} \operatorname{Re} \left( q_c \overline{k_c} \, e^{i (p_i - p_j) \omega_c} \right)",
}
"""LaTeX by the name of the encoding; b is a bias, a a logit, s the scale, p a position, T the temperature."""


def shown(name: str) -> str:
    """Return the formula of an encoding as Markdown, or '' if its docstring has none."""
    return "".join(f"$$\n{line}\n$$\n\n" for line in FORMULAS.get(name, "").split(r" \\ ") if line)


def mathml(html: str) -> str:
    r"""Return a page whose formulas, as `pymdownx.arithmatex` marks them, are MathML.

    >>> mathml(r'<span class="arithmatex">\(x^2\)</span>').startswith('<math')
    True
    """
    from html import unescape

    from latex2mathml.converter import convert  # comes with the extra docs

    def converted(match: re.Match[str]) -> str:
        latex = unescape(match[2]).strip()
        # a long line of its own is scrolled, not the page
        return (
            convert(latex)
            if match[1] == "span"
            else f'<div class="formula">{convert(latex, display="block")}</div>'
        )

    return re.sub(
        r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', converted, html, flags=re.DOTALL
    )
