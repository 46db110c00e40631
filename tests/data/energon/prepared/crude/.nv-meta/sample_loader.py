def sample_loader(raw):
    return dict(image=raw["jpg"], caption=raw["json"]["caption"].upper())


def part_filter(part):
    return part != "txt"
