def markdown(rows, version):
    return ""
