"""`python -m pictures`: write the SVG of every picture beside the module that draws it."""

from pictures.all_pictures import FOLDER, draw_all

for picture in draw_all():
    (FOLDER / f"{picture.name}.svg").write_text(picture.make_svg())
