"""The picture of the probe's page in the README: docs/images/page.png, two cards and the map, as a browser draws them.

Run after `make demo`: python -m scripts.page_picture [RESULTS]. Needs chromium and its driver (scripts/system_packages.sh).
"""

import argparse
from pathlib import Path

from PIL import Image
from scripts.example_outputs import IMAGES, ROOT, shrink
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait
from tests.support import needs

WIDTH, DENSITY = 900, 1.5
"""As wide as GitHub shows a README, so that letters keep their size."""
CARDS = ("Attention on the first token", "Does a head's write sharpen its own attention?")
LEFT_OUT = (
    "body > :not(main), main > :not(#findings):not(#map-section), .guard, .fold, .links, .unannounced, .note, #about"
)
TIGHT = "main { padding-block: 16px; } section { margin-top: 12px; }"


def browser() -> webdriver.Chrome:
    found = needs.browser()
    assert found is not None, "no browser: scripts/system_packages.sh installs one"
    options = webdriver.ChromeOptions()
    options.binary_location = found.program
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"):
        options.add_argument(flag)
    return webdriver.Chrome(options=options, service=webdriver.ChromeService(found.driver))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="?", default=ROOT / "massieu-results" / "demo", metavar="RESULTS")
    parser.add_argument("--picture", type=Path, default=IMAGES / "page.png", metavar="FILE")
    arguments = parser.parse_args()
    page = (arguments.results / "report.html").resolve().as_uri() + "#statistic=weight_first"
    driver = browser()
    metrics = {"width": WIDTH, "height": 1200, "deviceScaleFactor": DENSITY, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    driver.get(page)
    ready = "return document.documentElement.dataset.ready && document.querySelector('#map .main-svg')"
    WebDriverWait(driver, 60).until(lambda opened: opened.execute_script(ready))
    driver.execute_script(
        "document.querySelectorAll(arguments[0]).forEach((part) => { part.style.display = 'none'; });"
        "document.querySelectorAll('.card').forEach((card) => {"
        "  if (!arguments[1].includes(card.querySelector('h3').textContent)) card.style.display = 'none'; });"
        "document.adoptedStyleSheets = [new CSSStyleSheet()]; document.adoptedStyleSheets[0].replaceSync(arguments[2]);",
        LEFT_OUT,
        CARDS,
        TIGHT,
    )
    assert len([card for card in driver.find_elements(By.CSS_SELECTOR, ".card") if card.is_displayed()]) == len(CARDS)
    driver.find_element(By.TAG_NAME, "main").screenshot(str(arguments.picture))
    driver.quit()
    shrink(arguments.picture)
    print(f"picture: {arguments.picture}, {Image.open(arguments.picture).size}")


if __name__ == "__main__":
    main()
